"""Rows of a grid in which every pair of values of two factors occurs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, int]
"""Factor -> index of its value."""


def pairs_of(row: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    return set(combinations(row.items(), 2))


def pairwise(factors: Mapping[str, Sequence[Any]], name: str) -> list[Row]:
    """Always the best of some random rows with a missing pair; the same rows for the same name."""
    chance = random.Random(name)
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(factors, 2)
        for i, j in product(range(len(factors[a])), range(len(factors[b])))
    }
    rows = []
    while missing:
        wanted = dict(min(missing))
        candidates = [{f: chance.randrange(len(factors[f])) for f in factors} | wanted for _ in range(60)]
        row = max(candidates, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(row)
        rows.append(row)
    return rows
