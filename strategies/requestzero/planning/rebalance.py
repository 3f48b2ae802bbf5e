"""Sequences and micro-batches that move from a window's busiest ranks to its least busy ones."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from requestzero.planning.budget import Budget
from requestzero.planning.request_bins import Bin, RequestBins

EVEN = 1.005
"""Busiest rank over mean at which nothing is moved any more."""
ACCEPTABLE = 1.03
"""The same for moves that make a request's heaviest micro-batch heavier, for which the other ranks wait."""
_TARGETS = 4


@dataclass(slots=True)
class _Move:
    """One sequence for another rank, or (``row`` is ``None``) two micro-batches that change ranks."""

    source: Bin
    target: Bin
    row: int | None
    less: float
    """What the busy rank carries less."""
    more: float
    """What the other one carries more: not the same where padding comes or goes."""


Shares = list[dict[int, list[Bin]]]
"""For each request of a window: rank -> its micro-batches."""


def rebalance(
    requests: list[RequestBins], shares: Shares, loads: list[tuple[float, int]], budget: Budget
) -> list[tuple[float, int]]:
    """Move sequences, within their requests, until the ranks' loads are even or nothing helps.

    First only where no micro-batch becomes heavier than its request's heaviest, so that no rank waits longer; then,
    where that does not suffice, up to the budget.

    Args:
        requests: of the window.
        shares: what each rank has of each; changed in place.
        loads: ``(load, rank)`` of all ranks, ascending.
        budget: of a micro-batch.

    Returns:
        The new ``loads``.
    """
    heaviest = [request.bins[0].load for request in requests]
    for goal, limits in ((EVEN, heaviest), (ACCEPTABLE, [float("inf")] * len(requests))):
        _move_until(goal, limits, requests, shares, loads, budget)
    return loads


def _move_until(
    goal: float,
    limits: list[float],
    requests: list[RequestBins],
    shares: Shares,
    loads: list[tuple[float, int]],
    budget: Budget,
) -> None:
    total = sum(load for load, _ in loads)
    for _ in range(4 * len(loads) + 16):
        busiest, rank = loads[-1]
        if busiest * len(loads) <= goal * total:
            return
        for load, other in loads[:_TARGETS]:
            gap = busiest - load
            moves = chain(_swaps(rank, other, gap, shares), _moves(rank, other, gap, limits, requests, shares, budget))
            best = min(moves, key=lambda move: max(gap - move.less, move.more), default=None)
            if best is not None:
                break
        else:
            return
        _apply(best)
        loads.remove((busiest, rank))
        loads.remove((load, other))
        insort(loads, (busiest - best.less, rank))
        insort(loads, (load + best.more, other))
        total += best.more - best.less


def _swaps(rank: int, other: int, gap: float, shares: Shares) -> Iterator[_Move]:
    """Micro-batches of the same request that change places: for nobody there is more to compute or to wait for."""
    for share in shares:
        if rank in share and other in share:
            target = min(share[other], key=lambda item: item.load)
            for source in share[rank]:
                if 0 < source.load - target.load < gap:
                    yield _Move(source, target, None, source.load - target.load, source.load - target.load)


def _moves(
    rank: int,
    other: int,
    gap: float,
    limits: list[float],
    requests: list[RequestBins],
    shares: Shares,
    budget: Budget,
) -> Iterator[_Move]:
    """Moves after which both ranks carry less than ``rank`` does now, ``gap`` more than ``other``."""
    for request, share, limit in zip(requests, shares, limits, strict=True):
        sources = [item for item in share.get(rank, ()) if len(item.rows) > 1]
        if not sources or other not in share:
            continue
        source = max(sources, key=lambda item: item.load)
        target = min(share[other], key=lambda item: item.load)
        for row in _candidates(request, source, gap, budget):
            less = source.load - budget.load(request.lengths_of([item for item in source.rows if item != row]))
            grown = request.lengths_of([*target.rows, row])
            load = budget.load(grown)
            if less > 0 and load - target.load < gap and load <= limit and budget.allows(grown):
                yield _Move(source, target, row, less, load - target.load)


def _candidates(request: RequestBins, source: Bin, gap: float, budget: Budget) -> set[int]:
    """A few rows worth trying: the longest, the shortest, and those nearest to half the gap."""
    rows = source.rows
    low, high = 0, len(rows) - 1
    while low < high:  # the first row that costs no more than half of the gap
        middle = (low + high) // 2
        if budget.row_cost(request.lengths[rows[middle]]) <= gap / 2:
            high = middle
        else:
            low = middle + 1
    return {rows[0], rows[-1], rows[low], rows[max(low - 1, 0)]}


def _apply(move: _Move) -> None:
    if move.row is None:
        move.source.rows, move.target.rows = move.target.rows, move.source.rows
        move.source.load, move.target.load = move.target.load, move.source.load
        return
    move.source.rows.remove(move.row)
    insort(move.target.rows, move.row)
    move.source.load -= move.less
    move.target.load += move.more
