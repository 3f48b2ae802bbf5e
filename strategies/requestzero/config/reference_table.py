"""The options of this package in Markdown, made from the classes that declare them.

``python -m requestzero.config.reference_table`` prints a table; the documentation has a section for each option.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Mapping
from textwrap import dedent

from requestzero.config.option_record import FrontEnd, Option, options_of
from requestzero.config.options import OWNERS

_COLUMNS = ("option", "default", "meaning", "front ends", "DeepSpeed key")


def meanings_of(owner: type) -> dict[str, str]:
    """Return the docstring under each field of a class, on one line, by the field's name."""
    body = ast.parse(dedent(inspect.getsource(owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    meanings = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            meanings[statement.target.id] = " ".join(str(following.value.value).split())
    return meanings


def options_table(owners: Iterable[type] = OWNERS) -> str:
    """Return the table, one option a row, without a final newline.

    Args:
        owners: the classes that declare the options.
    """
    rows = [_COLUMNS, ("---",) * len(_COLUMNS)]
    for owner in owners:
        meanings = meanings_of(owner)
        rows += [_row(option, meanings[name]) for name, option in options_of(owner).items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def options_sections(owners: Iterable[type] = OWNERS) -> str:
    """Return a section for each option: its meaning, then default, front ends and DeepSpeed key.

    Args:
        owners: the classes that declare the options.
    """
    sections = []
    for owner in owners:
        meanings = meanings_of(owner)
        for name, option in options_of(owner).items():
            path, default, meaning, front_ends, key = _row(option, meanings[name])
            facts = {"default": default, "front ends": front_ends, "DeepSpeed key": key}
            lines = [f"- {label}: {text}" for label, text in facts.items()]
            sections.append("\n".join([f"## {path}", "", meaning, "", *lines]))
    return "\n\n".join(sections)


def _row(option: Option, meaning: str) -> tuple[str, ...]:
    default = f'"{option.default}"' if isinstance(option.default, str) else str(option.default)
    return f"`{option.path}`", f"`{default}`", meaning.replace("``", "`"), _front_ends(option), _key(option)


def _front_ends(option: Option) -> str:
    if option.front_ends == frozenset(FrontEnd):
        return "all"
    return ", ".join(front_end.value for front_end in FrontEnd if front_end in option.front_ends)


def _key(option: Option) -> str:
    if option.key is None:
        return "none"
    if isinstance(option.key, Mapping):
        return ", ".join(f"{precision}: `{key}`" for precision, key in option.key.items())
    stored = " or ".join(f'`"{value}"`' for value in option.stored.values())
    return f"`{option.key}`" + (f", {stored}" if stored else "")


def main() -> None:
    """Print the table."""
    print(options_table())


if __name__ == "__main__":
    main()
