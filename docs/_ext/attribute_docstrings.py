"""Docstrings of attributes and properties, whose first line may hold a colon.

Napoleon reads ``True while gradients are pending: ...`` as a type and its description. An empty comment as
first line stops it.
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

BEFORE_NAPOLEON = 400


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the handler."""
    app.connect("autodoc-process-docstring", protect_first_line, priority=BEFORE_NAPOLEON)
    return {"version": "1", "parallel_read_safe": True}


def protect_first_line(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Insert an empty comment before the docstring of an attribute or property."""
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]
