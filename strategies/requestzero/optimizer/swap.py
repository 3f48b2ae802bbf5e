"""Put a class in the place of DeepSpeed's for exactly one construction, and take it away again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def replaced(module: ModuleType, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Let ``module.name`` be ``replacement`` while the block runs.

    # HACK: DeepSpeed looks its engine and optimizer classes up by module-level name and offers no argument for them.
    # Other engines of the process, built outside the block, get the stock classes.

    Raises:
        RuntimeError: the name is replaced already; two replacements at once would restore the wrong class.
    """
    original = getattr(module, name)
    if not isinstance(original, type):
        raise RuntimeError(f"{module.__name__}.{name} is replaced already: build one engine at a time.")
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)
