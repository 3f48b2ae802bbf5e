"""Entries of the type stubs of DeepSpeed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.upstream_source import Function, Named, accessor_of, names_of, parse, statements

TYPINGS = Path(__file__).parents[2] / "typings"


@dataclass(frozen=True)
class Entry:
    """One name of a stub file: a function, a class, a value, or what it imports under its own name for others."""

    module: str
    classes: tuple[str, ...]
    name: str
    node: Named | ast.ImportFrom

    @property
    def qualname(self) -> str:
        return ".".join([*self.classes, self.name])

    @property
    def key(self) -> str:
        return f"{self.module}:{self.qualname}"

    def __str__(self) -> str:
        accessor = accessor_of(self.node) if isinstance(self.node, Function) else ""
        return f"{self.key}.{accessor}" if accessor else self.key

    @property
    def behaviour(self) -> str | None:
        """The docstring, which says what of its behaviour is relied on."""
        return ast.get_docstring(self.node) if isinstance(self.node, Function | ast.ClassDef) else None


def modules() -> dict[str, Path]:
    """Return the stub file of every module that has one."""
    found = {}
    for path in sorted(TYPINGS.rglob("*.pyi")):
        parts = path.relative_to(TYPINGS).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def entries() -> list[Entry]:
    """Return the entries of all stub files."""
    return [entry for module, path in modules().items() for entry in _entries(module, (), parse(path.read_text()).body)]


def _entries(module: str, classes: tuple[str, ...], body: list[ast.stmt]) -> Iterator[Entry]:
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield from (Entry(module, classes, alias.name, node) for alias in node.names if alias.asname == alias.name)
    for node in statements(body):
        for name in names_of(node):
            yield Entry(module, classes, name, node)
        if isinstance(node, ast.ClassDef):
            yield from _entries(module, (*classes, node.name), node.body)
