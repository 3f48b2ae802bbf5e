"""Definitions in a module's source text, found by qualified name in the syntax tree. Nothing is imported.

``inspect.getsource`` follows a decorated function to the decorator's wrapper: every method under one decorator would
have the same source.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
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
    docstring: range
    """Lines of the docstring, counted in ``lines`` from 0; empty without one, or where it shares a line with code."""

    @property
    def fingerprint(self) -> str:
        """Hash of the code: without docstring, lines that are a comment, blank lines, and indentation of the whole.

        Made of lines and not of the tree, whose nodes differ between versions of Python.
        """
        written = [line.rstrip() for at, line in enumerate(self.lines.splitlines()) if at not in self.docstring]
        code = [line for line in written if line and not line.lstrip().startswith("#")]
        return hashlib.sha256(dedent("\n".join(code)).encode()).hexdigest()[:16]


class Source:
    """The text of a module and what it defines."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.splitlines()

    def find(self, qualname: str) -> dict[str, Definition]:
        """Return what ``qualname`` is here: at ``""``, and a property's accessors at their names."""
        *classes, name = qualname.split(".")
        name = written_name(classes, name)
        body = self.tree.body
        for each in classes:
            inner = [node for node in statements(body) if isinstance(node, ast.ClassDef) and node.name == each]
            body = inner[-1].body if inner else []
        return {accessor_of(node): self._definition(node) for node in statements(body) if name in names_of(node)}

    def _definition(self, node: Named) -> Definition:
        decorators = [] if isinstance(node, ast.Assign | ast.AnnAssign) else node.decorator_list
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        lines = "\n".join(self._lines[first - 1 : node.end_lineno])
        return Definition(node, lines, self._docstring(node, first))

    def _docstring(self, node: Named, first: int) -> range:
        if isinstance(node, ast.Assign | ast.AnnAssign) or ast.get_docstring(node, clean=False) is None:
            return range(0)
        expression = node.body[0]
        if self._lines[expression.lineno - 1][: expression.col_offset].strip():
            return range(0)
        return range(expression.lineno - first, (expression.end_lineno or expression.lineno) - first + 1)


def written_name(classes: list[str], name: str) -> str:
    """Return a name as it stands in the innermost of its classes: one that is private to it stands there without it."""
    if not classes or f"{classes[-1]}__" not in name:
        return name
    return name.removeprefix(f"_{classes[-1].lstrip('_')}")


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
