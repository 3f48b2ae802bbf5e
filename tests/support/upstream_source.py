"""Definitions in the source of an installed package, found by qualified name in the syntax tree.

``inspect.getsource`` follows a decorated function to the decorator's wrapper: every method under one decorator would
have the same source.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

Function = ast.FunctionDef | ast.AsyncFunctionDef
Named = Function | ast.ClassDef | ast.Assign | ast.AnnAssign

ACCESSORS = ("setter", "deleter")


@dataclass(frozen=True)
class Definition:
    """One function, class or assignment, as it is written."""

    node: Named
    lines: str
    """Decorators included."""

    @property
    def signature(self) -> str:
        """Parameters and result of a function, bases of a class, nothing of an assignment."""
        if isinstance(self.node, Function):
            result = f" -> {ast.unparse(self.node.returns)}" if self.node.returns else ""
            return f"({ast.unparse(self.node.args)}){result}"
        return f"({', '.join(map(ast.unparse, self.node.bases))})" if isinstance(self.node, ast.ClassDef) else ""

    @property
    def is_function(self) -> bool:
        """False for classes and plain values; a property may also be assigned."""
        if isinstance(self.node, ast.Assign):
            made_by = self.node.value.func if isinstance(self.node.value, ast.Call) else None
            return isinstance(made_by, ast.Name) and made_by.id == "property"
        return isinstance(self.node, Function)

    @property
    def sha256(self) -> str:
        """Hash of the lines, without indentation of the whole, blank lines and blanks at line ends."""
        lines = [line.rstrip() for line in dedent(self.lines).splitlines() if line.strip()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def pin(self) -> dict[str, str]:
        return {"signature": self.signature, "sha256": self.sha256}


@cache
def read(module: str) -> str:
    """Return the text of an installed module."""
    spec = find_spec(module)
    assert spec, f"there is no module {module} any more"
    return Path(str(spec.origin)).read_text(encoding="utf-8")


def find(text: str, qualname: str) -> dict[str, Definition]:
    """Return what ``qualname`` is in the source ``text``: at ``""``, and a property's accessors at their names."""
    *classes, name = qualname.split(".")
    body = parse(text).body
    for each in classes:
        inner = [node for node in statements(body) if isinstance(node, ast.ClassDef) and node.name == each]
        body = inner[-1].body if inner else []
    return {
        accessor_of(node): Definition(node, _lines(text, node)) for node in statements(body) if name in names_of(node)
    }


@cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


def statements(body: Iterable[ast.AST]) -> Iterator[Named]:
    """Yield what a body defines, also under its conditions."""
    for node in body:
        if isinstance(node, Named):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from statements(ast.iter_child_nodes(node))


def names_of(node: Named) -> list[str]:
    """Return the names that a definition binds."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return [node.name]


def accessor_of(node: Named) -> str:
    """Return ``"setter"`` or ``"deleter"`` for such a part of a property, ``""`` for everything else."""
    decorators = node.decorator_list if isinstance(node, Function) else []
    found = [each.attr for each in decorators if isinstance(each, ast.Attribute) and each.attr in ACCESSORS]
    return found[0] if found else ""


def _lines(text: str, node: Named) -> str:
    decorators = [] if isinstance(node, ast.Assign | ast.AnnAssign) else node.decorator_list
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
