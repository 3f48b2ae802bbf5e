"""The name that somebody may have meant by one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like ``name``, or ``None`` where none is.

    A dotted name whose last part is the same comes first: ``max_steps`` is like ``trainer.max_steps``.
    """
    names = list(known)
    same_leaf = [each for each in names if each.rpartition(".")[2] == name.rpartition(".")[2]]
    close = same_leaf or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return close[0] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the end of a message, or nothing where no known name is like ``name``."""
    found = closest(name, known)
    return "" if found is None else f" Did you mean {found!r}?"
