"""Of a test with three independent parameters or more, the sets in which every pair of their values occurs.

Most mistakes show in one value or in two together, and all combinations of six parameters take minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, groupby

import pytest


def cover_pairs(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items to run and the others."""
    kept = [item for _, group in groupby(items, key=_function) for item in _covering(list(group))]
    chosen = set(map(id, kept))
    return kept, [item for item in items if id(item) not in chosen]


def _covering(items: list[pytest.Item]) -> list[pytest.Item]:
    sets = [{name: repr(value) for name, value in _parameters(item).items()} for item in items]
    factors = _independent(sets)
    if len(factors) < 3:
        return items
    pairs = [set(combinations([(name, each[name]) for name in factors], 2)) for each in sets]
    missing = set().union(*pairs)
    chosen = set()
    while missing:
        best = max(range(len(items)), key=lambda index: len(pairs[index] & missing))
        missing -= pairs[best]
        chosen.add(best)
    return [items[index] for index in sorted(chosen)]


def _independent(sets: Sequence[dict[str, str]]) -> list[str]:
    """Return a name of each parameter; of those whose values always belong together, the first."""
    columns: dict[tuple[int, ...], str] = {}
    for name in sets[0]:
        values = [each[name] for each in sets]
        columns.setdefault(tuple(map(values.index, values)), name)
    return list(columns.values())


def _parameters(item: pytest.Item) -> dict[str, object]:
    callspec = getattr(item, "callspec", None)
    return dict(callspec.params) if callspec else {}


def _function(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]
