"""The table of features is that of the tests: ``python tests/docs/test_features.py`` writes it anew."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.features import FEATURES, Feature, table

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reference" / "as-under-ddp.md"
BEGIN, END = "<!-- features: begin -->", "<!-- features: end -->"


def with_table(text: str) -> str:
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text() == with_table(PAGE.read_text()), "run: python tests/docs/test_features.py"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_the_test_exists(feature: Feature) -> None:
    file, _, test = feature.test.partition("::")
    function, _, parameter = test.rstrip("]").partition("[")
    tree = ast.parse((TESTS / file).read_text())
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert not parameter or parameter in names


def test_every_feature_is_named_once() -> None:
    assert len({(each.name, each.front_end) for each in FEATURES}) == len(FEATURES) > 0


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
