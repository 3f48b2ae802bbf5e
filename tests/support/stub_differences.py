"""Comparison of a stub's entry with the installed package."""

from __future__ import annotations

import ast
from importlib import import_module

from support.deepspeed_stubs import Entry
from support.upstream_source import Function, accessor_of, find, names_of, read, statements

# A name that a stub denies although it is there; see DeepSpeedEngine.
DENIED = {"__getattr__"}


def difference(entry: Entry) -> str | None:
    """Return how the installed package differs from the entry; ``None`` if it agrees."""
    if isinstance(entry.node, Function):
        return _function(entry)
    return _class(entry) if isinstance(entry.node, ast.ClassDef) else _value(entry)


def _function(entry: Entry) -> str | None:
    definition = find(read(entry.module), entry.qualname).get(accessor_of(entry.node))
    if definition is None or not isinstance(definition.node, Function):
        return "is not defined there"
    assert isinstance(entry.node, Function)
    if _binding(entry.node) != _binding(definition.node):
        return f"is a {_binding(definition.node)} there"
    stub, source = _parameters(entry.node), _parameters(definition.node)
    return None if stub == source else f"has the parameters {source} there, and {stub} here"


def _binding(node: Function) -> str:
    """Return how a function is bound to its object; other decorators leave that as it is."""
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    bindings = names & {"property", "setter", "deleter", "staticmethod", "classmethod"}
    return " ".join(sorted(bindings)) or "function"


def _parameters(node: Function) -> list[tuple[str, str, bool]]:
    """Return name, kind, and whether there is a default, of every parameter."""
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    required = len(positional) - len(args.defaults)
    found = [
        (arg.arg, "positional" if arg in args.posonlyargs else "any", place >= required)
        for place, arg in enumerate(positional)
    ]
    found += [(arg.arg, "*", False) for arg in [args.vararg] if arg]
    found += [
        (arg.arg, "keyword", default is not None)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return found + [(arg.arg, "**", False) for arg in [args.kwarg] if arg]


def _class(entry: Entry) -> str | None:
    definition = find(read(entry.module), entry.qualname).get("")
    if definition is None or not isinstance(definition.node, ast.ClassDef):
        return "is not defined there"
    assert isinstance(entry.node, ast.ClassDef)
    missing = _bases(entry.node) - _bases(definition.node)
    return f"has no base {sorted(missing)} there" if missing else None


def _bases(node: ast.ClassDef) -> set[str]:
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return {ast.unparse(base).rpartition(".")[2] for base in bases}


def _value(entry: Entry) -> str | None:
    if not entry.classes:
        return None if hasattr(import_module(entry.module), entry.name) else "is not there"
    owner = find(read(entry.module), ".".join(entry.classes)).get("")
    if entry.name in DENIED or (owner and entry.name in _attributes(owner.node)):
        return None
    return "is assigned nowhere in the class"


def _attributes(node: ast.AST) -> set[str]:
    """Return what a class body assigns, and what its methods assign to ``self`` or ``self.__dict__``."""
    assert isinstance(node, ast.ClassDef)
    found = {name for each in statements(node.body) for name in names_of(each)}
    for each in ast.walk(node):
        if not isinstance(each, ast.Attribute | ast.Subscript) or not isinstance(each.ctx, ast.Store):
            continue
        if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
            found.add(each.attr)
        elif isinstance(each, ast.Subscript) and ast.unparse(each.value) == "self.__dict__":
            found.add(str(ast.literal_eval(each.slice)))
    return found
