"""Each line of the table of drop-in behaviour names a test that is there."""

from __future__ import annotations

import re

import pytest

from support.paths import ROOT

TABLE = (ROOT / "docs" / "reference" / "drop-in.md").read_text()
NAMED = re.findall(r"`([\w/]+\.py)(?:::(\w+))?` \|$", TABLE, re.MULTILINE)


def test_every_line_names_a_test() -> None:
    lines = [line for line in TABLE.splitlines() if line.startswith("| ")]
    assert len(NAMED) == len(lines) - 1  # the head
    assert len(NAMED) > 20


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_the_named_test_is_there(path: str, name: str) -> None:
    text = (ROOT / "tests" / path).read_text()
    assert f"\ndef {name}(" in text if name else "\ndef test_" in text
