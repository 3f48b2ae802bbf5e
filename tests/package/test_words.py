"""Plain words: how docstrings begin, and idioms that are kept out of code, comments and settings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
FOLDERS = [CHECKOUT / name for name in ("strategies", "recipes", "configs", "benchmarks", "tests")]
FILES = sorted(
    path
    for folder in FOLDERS
    for path in folder.rglob("*.*")
    if path.suffix in (".py", ".yaml", ".jinja") and path != Path(__file__)
)

# Idiom -> the field's word.
IDIOMS = {
    "door": "front end",
    "judg": "check, result",
    "verdict": "result",
    "travel": "move, offload",
    "settle": "resolve, release",
    "farewell": "grace period",
    "weigh": "resolve the divisor",
}
IDIOM = re.compile(rf"(?<![a-z])(un)?({'|'.join(IDIOMS)})(?!t)", re.IGNORECASE)


def idioms(text: str) -> list[str]:
    """Return the lines with an idiom; ``weight`` is none."""
    return [line.strip() for line in text.splitlines() if IDIOM.search(line)]


def questions(text: str) -> list[str]:
    """Return the functions whose docstring begins like a question."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [node.name for node in functions if re.match(r"(What|Whether|Where)\b", ast.get_docstring(node) or "")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_words_are_plain(path: Path) -> None:
    text = path.read_text()
    assert idioms(text) == []
    if path.suffix == ".py":
        assert questions(text) == []


def test_what_is_not_plain_is_seen() -> None:
    assert idioms("judge_request(window)\n# every door\nself.travelled\nunjudged") == [
        "judge_request(window)",
        "# every door",
        "self.travelled",
        "unjudged",
    ]
    assert idioms("weight of a micro-batch\nindoor") == []
    assert questions('def f():\n    """Whether it is so."""\n\ndef g():\n    """Return it."""') == ["f"]
    assert len(FILES) > 100
