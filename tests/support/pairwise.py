"""Rows of a grid in which every pair of values of two factors occurs."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, int]
"""Factor -> index of its value."""
Pair = frozenset[tuple[str, int]]
"""Two factors, each with the index of its value."""


def pairs_of(row: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    return set(combinations(row.items(), 2))


def pairwise(factors: Mapping[str, Sequence[Any]], name: str, refused: Collection[Pair] = ()) -> list[Row]:
    """Always the best of some random rows with a missing pair; the same rows for the same name.

    Args:
        factors: all values of each; at least two factors.
        name: what the random rows are seeded with.
        refused: pairs of values that no row may have.
    """
    chance = random.Random(name)
    missing = every_pair(factors, refused)
    rows = []
    while missing:
        wanted = dict(min(missing))
        candidates = [{f: chance.randrange(len(factors[f])) for f in factors} | wanted for _ in range(60)]
        possible = [row for row in candidates if not any(pair <= row.items() for pair in refused)]
        row = max(possible, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(row)
        rows.append(row)
    return rows


def every_pair(factors: Mapping[str, Sequence[Any]], refused: Collection[Pair] = ()) -> set[tuple[Any, ...]]:
    """Return the pairs that rows have to have."""
    return {
        ((a, i), (b, j))
        for a, b in combinations(factors, 2)
        for i, j in product(range(len(factors[a])), range(len(factors[b])))
        if frozenset({(a, i), (b, j)}) not in refused
    }
