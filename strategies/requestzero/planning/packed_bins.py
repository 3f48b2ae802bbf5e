"""Cut a request into packed micro-batches: as few as possible on every rank, then as even as possible."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from requestzero.planning.budget import Budget


def packed_bins(lengths: Sequence[int], budget: Budget, world_size: int) -> tuple[int, list[list[int]]]:
    """Cut a request into as few packed micro-batches per rank as possible.

    Longest first, each sequence goes to the lightest micro-batch; where that exceeds the budget, to the fullest one
    that has room (best fit decreasing, at most 11/9 of the fewest micro-batches plus one); where that fails as well,
    every rank gets one more. No micro-batch is empty unless there are fewer sequences than micro-batches.

    Args:
        lengths: tokens of each sequence, the longest first. Those beyond the budget are alone in a micro-batch.
        budget: limits of a micro-batch.
        world_size: number of data-parallel ranks.

    Returns:
        The number of micro-batches per rank; and for each micro-batch that is no filler, on whatever rank, the places
        of its sequences in ``lengths``, ascending.
    """
    micro_batches = -(-_fewest(lengths, budget) // world_size)
    while True:
        count = world_size * micro_batches
        if len(lengths) <= count:
            return micro_batches, [[place] for place in range(len(lengths))]
        bins = _lightest_first(lengths, budget, count) or _fullest_first(lengths, budget, count)
        if bins is not None:
            return micro_batches, bins
        micro_batches += 1


def _fewest(lengths: Sequence[int], budget: Budget) -> int:
    """Return a lower bound of the number of micro-batches, over all ranks."""
    alone = _count_longer(lengths, budget.tokens)
    rest = len(lengths) - alone
    by_tokens = -(-sum(lengths[alone:]) // budget.tokens)
    by_halves = _count_longer(lengths, budget.tokens // 2) - alone  # no two of these fit together
    return alone + max(by_tokens, by_halves, -(-rest // (budget.sequences or max(rest, 1))))


def _count_longer(lengths: Sequence[int], tokens: int) -> int:
    return bisect_left(lengths, -tokens, key=lambda length: -length) if lengths and lengths[0] > tokens else 0


def _lightest_first(lengths: Sequence[int], budget: Budget, count: int) -> list[list[int]] | None:
    """Return even micro-batches, or ``None`` where one would exceed the budget."""
    bins: list[list[int]] = [[] for _ in range(count)]
    lightest: list[tuple[float, int, int]] = [(0.0, 0, number) for number in range(count)]
    for place, length in enumerate(lengths):
        if not lightest:
            return None
        load, tokens, number = lightest[0]
        if tokens and tokens + length > budget.tokens:
            return None
        bins[number].append(place)
        if len(bins[number]) == budget.sequences:
            heapq.heappop(lightest)
        else:
            heapq.heapreplace(lightest, (load + budget.row_cost(length), tokens + length, number))
    return bins


def _fullest_first(lengths: Sequence[int], budget: Budget, count: int) -> list[list[int]] | None:
    """Return full micro-batches, or ``None`` where more than ``count`` would be needed."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for place, length in enumerate(lengths):
        fit = bisect_left(rooms, (length, -1))
        if fit == len(rooms):
            if len(bins) == count:
                return None
            room, number = budget.tokens, len(bins)
            bins.append([])
        else:
            room, number = rooms.pop(fit)
        bins[number].append(place)
        if len(bins[number]) != budget.sequences:
            insort(rooms, (room - length, number))
    _split_until(bins, lengths, budget, count)
    return bins


def _split_until(bins: list[list[int]], lengths: Sequence[int], budget: Budget, count: int) -> None:
    """Halve the heaviest micro-batches until there are ``count``."""
    heaviest = [(-budget.load([lengths[place] for place in rows]), n) for n, rows in enumerate(bins) if len(rows) > 1]
    heapq.heapify(heaviest)
    while len(bins) < count:
        _, number = heapq.heappop(heaviest)
        rows = bins[number]
        bins[number] = rows[::2]
        bins.append(rows[1::2])
        for half in (number, len(bins) - 1):
            if len(bins[half]) > 1:
                heapq.heappush(heaviest, (-budget.load([lengths[place] for place in bins[half]]), half))
