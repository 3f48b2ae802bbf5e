"""Definitions in the source of an installed package: their signatures and pins."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

from requestzero.environment.definitions import (  # noqa: F401 (tests import them from here)
    ACCESSORS,
    Function,
    Named,
    Source,
    accessor_of,
    names_of,
    statements,
)


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
    return {accessor: Definition(each.node, each.lines) for accessor, each in _source(text).find(qualname).items()}


def parse(text: str) -> ast.Module:
    return _source(text).tree


@cache
def _source(text: str) -> Source:
    return Source(text)
