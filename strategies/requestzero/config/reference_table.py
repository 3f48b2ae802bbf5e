"""The options of this package as a Markdown table, made from the classes that own them.

``python -m requestzero.config.reference_table`` prints it; given ``README.md``, it rewrites it there,
between its two markers.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from textwrap import dedent
from typing import Any

from requestzero.config.settings import OverflowSettings, RequestZeROSettings

BEGIN = "<!-- options: begin (python -m requestzero.config.reference_table README.md) -->"
END = "<!-- options: end -->"
_KEY = re.compile(r"\s*DeepSpeed key: ``([^`]+)``\.")


def field_docs(owner: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line, by the field's name."""
    body = ast.parse(dedent(inspect.getsource(owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def _default(option: Field[Any]) -> str:
    if option.default is MISSING:
        return ""
    return f'"{option.default}"' if isinstance(option.default, str) else str(option.default)


def _row(name: str, option: Field[Any], text: str) -> str:
    key = _KEY.search(text)
    meaning = _KEY.sub("", text).replace("``", "`")
    return f"| `{name}` | `{_default(option)}` | {meaning} | {f'`{key.group(1)}`' if key else ''} |"


def options_table() -> str:
    """The table, one option a row, without a final newline."""
    rows = ["| option | default | meaning | DeepSpeed key |", "|---|---|---|---|"]
    for owner, prefix in ((RequestZeROSettings, ""), (OverflowSettings, "overflow.")):
        docs = field_docs(owner)
        rows += [
            _row(prefix + option.name, option, docs[option.name])
            for option in fields(owner)
            if option.name != "overflow"
        ]
    return "\n".join(rows)


def with_options_table(document: str) -> str:
    """The document with the table between its markers; ValueError if it does not hold each marker once."""
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"The document must hold each of these lines once: {BEGIN} and {END}")
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n{options_table()}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> None:
    if not arguments:
        print(options_table())
    for name in arguments:
        path = Path(name)
        path.write_text(with_options_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
