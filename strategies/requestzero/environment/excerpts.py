"""A definition cut out of a module's text by indentation, which is much faster than parsing the module."""

from __future__ import annotations

import re
from collections.abc import Iterator

from requestzero.environment.definitions import written_name

_INDENT = " " * 4
_BEFORE = re.compile(r"( *)((?:async def|def|class) )?")
_AFTER = re.compile(r"(?!\w)(?: *[:=](?!=))?")
_NEXT_MEMBER = re.compile(r"\n(?= {0,4}[^\s)\]}#])")
_NEXT_IN_MODULE = re.compile(r"\n(?=[^\s)\]}#])")
"""Not a closing bracket, which ends the arguments of the definition before it, nor a comment, which may stand in it."""
_AFTER_CLASS = re.compile(r"\n(?=class |def |async def |@)")
"""Comments and strings within a class may stand farther left than it."""


class Excerpts:
    """The definitions of one module.

    Where a string within a definition stands farther left than it, an excerpt ends early: only one that is equal to
    what was expected says something.

    Args:
        text: of the module.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._classes: dict[str, str] = {}

    def of(self, qualname: str) -> str:
        """Return what has this name, decorators included; of a method with a line for its class.

        Args:
            qualname: a name of the module, or ``"Class.name"``; of others nothing is returned.
        """
        *classes, name = qualname.split(".")
        if not classes:
            return "\n".join(_blocks(self._text, "", name, _NEXT_IN_MODULE))
        body = self._class(classes[0]) if len(classes) == 1 else ""
        members = _blocks(body, _INDENT, written_name(classes, name), _NEXT_MEMBER)
        return "\n".join([f"class {classes[0]}:", *members]) if members else ""

    def is_nowhere(self, qualname: str) -> bool:
        """Return whether nothing defines the last part of this name, wherever it would stand."""
        *classes, name = qualname.split(".")
        return next(_lines_that_define(self._text, written_name(classes, name)), None) is None

    def _class(self, name: str) -> str:
        if name not in self._classes:
            self._classes[name] = "\n".join(_blocks(self._text, "", name, _AFTER_CLASS))
        return self._classes[name]


def _blocks(text: str, indent: str, name: str, end: re.Pattern[str]) -> list[str]:
    """Return the text of every definition of this name at exactly this indentation, up to what matches ``end``.

    Nothing is returned where another may stand under a condition, which would count instead.
    """
    found = []
    for begin, before in _lines_that_define(text, name):
        if before == indent:
            following = end.search(text, begin)
            found.append(text[_with_decorators(text, begin, indent) : following.start() if following else len(text)])
        elif not (indent and _is_in_method(text, begin)):
            return []
    return found


def _is_in_method(text: str, begin: int) -> bool:
    """Return whether a line stands in a method of a class, by the last line before it that is indented as one."""
    line = text.rfind(f"\n{_INDENT}", 0, begin)
    while line >= 0 and text[line + 1 + len(_INDENT)].isspace():
        line = text.rfind(f"\n{_INDENT}", 0, line)
    return line >= 0 and text.startswith(("def ", "async def ", ")"), line + 1 + len(_INDENT))


def _lines_that_define(text: str, name: str) -> Iterator[tuple[int, str]]:
    """Yield the begin and the indentation of every line that defines this name."""
    at = text.find(name)
    while at >= 0:
        begin = text.rfind("\n", 0, at) + 1
        before, after = _BEFORE.fullmatch(text, begin, at), _AFTER.match(text, at + len(name))
        if before and after and (before[2] or after[0]):
            yield begin, before[1]
        at = text.find(name, at + len(name))


def _with_decorators(text: str, begin: int, indent: str) -> int:
    while begin:
        line = text.rfind("\n", 0, begin - 1) + 1
        if not text.startswith(f"{indent}@", line):
            break
        begin = line
    return begin
