"""Of a test with three independent parameters or more, the sets in which every pair of their values occurs.

Most mistakes show in one value or in two together, and all combinations of six parameters take minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import pytest

from support.pairwise import pairs_of


def cover_pairs(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items to run and the others."""
    kept = [item for _, group in groupby(items, key=function_of) for item in _covering(list(group))]
    return kept, without(items, kept)


def without(items: list[pytest.Item], kept: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items that are not kept."""
    chosen = set(map(id, kept))
    return [item for item in items if id(item) not in chosen]


def function_of(item: pytest.Item) -> str:
    """Return the test function's name, without its parameters."""
    return item.nodeid.split("[")[0]


def _covering(items: list[pytest.Item]) -> list[pytest.Item]:
    sets = [{name: repr(value) for name, value in _parameters(item).items()} for item in items]
    factors = _independent(sets)
    if len(factors) < 3:
        return items
    pairs = [pairs_of({name: each[name] for name in factors}) for each in sets]
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
