"""Cut a request into padded micro-batches: as few as possible on every rank, with little padding, and even."""

from __future__ import annotations

import math
from collections.abc import Sequence

from requestzero.planning.budget import Budget

_PRECISION = 0.002
"""How far above the smallest possible limit the heaviest micro-batch may stay."""


def padded_bins(lengths: Sequence[int], budget: Budget, world_size: int) -> tuple[int, list[list[int]]]:
    """Cut a request into as few padded micro-batches per rank as possible.

    Sequences of similar length go together: in descending order they are cut into runs, each as long as the budget
    allows (the fewest micro-batches that there can be), and then again with the lowest limit on a run's cost for
    which there are no more runs than micro-batches. No micro-batch is empty unless there are fewer sequences than
    micro-batches.

    Arguments and result are those of :func:`~requestzero.planning.packed_bins.packed_bins`.
    """
    total = len(lengths)
    fewest = _cut(lengths, budget, math.inf, total)
    assert fewest is not None
    micro_batches = -(-len(fewest) // world_size)
    count = world_size * micro_batches
    if total <= count:
        return micro_batches, [[place] for place in range(total)]
    return micro_batches, _most_even(lengths, budget, count)


def _most_even(lengths: Sequence[int], budget: Budget, count: int) -> list[list[int]]:
    runs = _cut(lengths, budget, math.inf, count, fill=True)
    assert runs is not None
    high = max(budget.load([lengths[place] for place in run]) for run in runs)
    low = max(budget.row_cost(lengths[0]), sum(map(budget.row_cost, lengths)) / count)
    while high - low > _PRECISION * low:
        middle = (low + high) / 2
        found = _cut(lengths, budget, middle, count, fill=True)
        if found is None:
            low = middle
        else:
            runs, high = found, middle
    return [list(run) for run in runs]


def _cut(lengths: Sequence[int], budget: Budget, limit: float, count: int, fill: bool = False) -> list[range] | None:
    """Return runs of at most ``limit`` cost, or ``None`` where ``count`` do not suffice.

    With ``fill`` there are exactly ``count`` of them.
    """
    runs: list[range] = []
    start, total = 0, len(lengths)
    while start < total:
        if len(runs) == count:
            return None
        rows = _rows(lengths[start], budget, limit)
        if fill:  # leave one sequence for each run to come
            rows = min(rows, total - start - (count - len(runs) - 1))
        stop = min(total, start + max(rows, 1))
        runs.append(range(start, stop))
        start = stop
    return runs


def _rows(longest: int, budget: Budget, limit: float) -> int:
    rows = budget.tokens // longest
    if limit < math.inf:
        rows = min(rows, int(limit // budget.row_cost(longest)))
    return min(rows, budget.sequences or rows)
