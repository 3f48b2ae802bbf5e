"""Put something in the place of a name of DeepSpeed's for exactly one call, and take it away again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_replaced: set[tuple[str, str]] = set()


@contextmanager
def patched(module: ModuleType, name: str, replacement: Any) -> Iterator[None]:
    """Let ``module.name`` be ``replacement`` while the block runs.

    # HACK: DeepSpeed looks its engine and optimizer classes, and its collectives, up by module-level name and offers no
    # argument for them. Other engines of the process, used outside the block, get what is DeepSpeed's own.

    Raises:
        RuntimeError: the name is replaced already; two replacements at once would restore the wrong one.
    """
    place = (module.__name__, name)
    if place in _replaced:
        raise RuntimeError(f"{module.__name__}.{name} is replaced already: use one engine at a time.")
    original = getattr(module, name)
    _replaced.add(place)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)
        _replaced.remove(place)


def is_replaced(module: ModuleType, name: str) -> bool:
    """Return true while ``module.name`` is replaced."""
    return (module.__name__, name) in _replaced
