"""Move sequences and micro-batches from a window's busiest ranks to its least busy ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, product

from requestzero.planning.budget import Budget
from requestzero.planning.request_bins import Bin, RequestBins

EVEN = 1.005
"""Ratio of the busiest rank's load to the mean at which nothing more is moved."""
ACCEPTABLE = 1.03
"""The same for moves that make a request's heaviest micro-batch heavier, for which the other ranks wait."""
_TARGETS = 4
"""Number of the least busy ranks that are tried as targets."""
_TARGETS_IN_FULL = 64
"""The same in a full search."""


@dataclass(slots=True)
class _Move:
    """An exchange between two micro-batches of one request, with what they hold afterwards."""

    source: Bin
    target: Bin
    source_rows: list[int]
    target_rows: list[int]
    source_load: float
    target_load: float

    @property
    def less(self) -> float:
        """By how much the load of the busy rank falls."""
        return self.source.load - self.source_load

    @property
    def more(self) -> float:
        """By how much the load of the other rank rises: not the same where padding comes or goes."""
        return self.target_load - self.target.load

    def apply(self) -> None:
        self.source.rows, self.source.load = self.source_rows, self.source_load
        self.target.rows, self.target.load = self.target_rows, self.target_load


Shares = list[dict[int, list[Bin]]]
"""For each request of a window: rank -> its micro-batches."""


def rebalance(
    requests: list[RequestBins], shares: Shares, loads: list[tuple[float, int]], budget: Budget
) -> list[tuple[float, int]]:
    """Move sequences, within their requests, until the ranks' loads are even or nothing helps.

    First only where no micro-batch becomes heavier than its request's heaviest, so that no rank waits longer; then,
    where that does not suffice, up to the budget; then, which is rare, with a look at every sequence.

    Args:
        requests: requests of the window.
        shares: the ranks' micro-batches of each request; changed in place.
        loads: ``(load, rank)`` of all ranks, ascending.
        budget: limits of a micro-batch.

    Returns:
        The new ``loads``.
    """
    heaviest = [request.bins[0].load for request in requests]
    unlimited = [float("inf")] * len(requests)
    _move_until(EVEN, heaviest, requests, shares, loads, budget)
    _move_until(ACCEPTABLE, unlimited, requests, shares, loads, budget)
    _move_until(ACCEPTABLE, unlimited, requests, shares, loads, budget, in_full=True)
    return loads


def _move_until(
    goal: float,
    limits: list[float],
    requests: list[RequestBins],
    shares: Shares,
    loads: list[tuple[float, int]],
    budget: Budget,
    in_full: bool = False,
) -> None:
    total = sum(load for load, _ in loads)
    for _ in range(4 * len(loads) + 16):
        busiest, rank = loads[-1]
        if busiest * len(loads) <= goal * total:
            return
        for load, other in loads[:-1][: _TARGETS_IN_FULL if in_full else _TARGETS]:
            gap = busiest - load
            sequences = _moves(rank, other, gap, limits, requests, shares, budget, in_full)
            moves = chain(_swaps(rank, other, gap, shares), sequences)
            best = min(moves, key=lambda move: max(gap - move.less, move.more), default=None)
            if best is not None:
                break
        else:
            return
        less, more = best.less, best.more
        best.apply()
        loads.remove((busiest, rank))
        loads.remove((load, other))
        insort(loads, (busiest - less, rank))
        insort(loads, (load + more, other))
        total += more - less


def _swaps(rank: int, other: int, gap: float, shares: Shares) -> Iterator[_Move]:
    """Yield exchanges of whole micro-batches, after which no rank has more to compute or to wait for."""
    for share in shares:
        if rank in share and other in share:
            target = min(share[other], key=lambda item: item.load)
            for source in share[rank]:
                if 0 < source.load - target.load < gap:
                    yield _Move(source, target, target.rows, source.rows, target.load, source.load)


def _moves(
    rank: int,
    other: int,
    gap: float,
    limits: list[float],
    requests: list[RequestBins],
    shares: Shares,
    budget: Budget,
    in_full: bool,
) -> Iterator[_Move]:
    """Yield moves of a sequence to ``other``, alone or for a shorter one in return, that lower the higher load.

    ``gap`` is by how much the load of ``rank`` is above that of ``other``.
    """
    for request, share, limit in zip(requests, shares, limits, strict=True):
        if rank not in share or other not in share:
            continue
        for source, target in _pairs(share[rank], share[other], in_full):
            for row, back in _candidates(request, source, target, gap, budget, in_full):
                move = _exchange(request, source, target, row, back, budget)
                fits = move.target_load <= limit and budget.allows(request.lengths_of(move.target_rows))
                if fits and move.less > 0 and move.more < gap:
                    yield move


def _pairs(given: list[Bin], taken: list[Bin], in_full: bool) -> Iterable[tuple[Bin, Bin]]:
    """Return pairs of micro-batches, one to move a sequence from and one to move it to."""
    if in_full:
        return product(given, taken)
    source = max(given, key=lambda item: (len(item.rows) > 1, item.load))
    return [(source, min(taken, key=lambda item: item.load))]


def _candidates(
    request: RequestBins, source: Bin, target: Bin, gap: float, budget: Budget, in_full: bool
) -> Iterator[tuple[int, int | None]]:
    """Yield rows to move and rows to move in return: those that move about half of the gap, and the extremes.

    In full: every row, with the one in return that comes nearest to half of the gap.
    """
    costs = [budget.row_cost(length) for length in request.lengths_of(source.rows)]
    if len(costs) > 1:
        near = _first_at_most(costs, gap / 2)
        for place in range(len(costs)) if in_full else {0, len(costs) - 1, near, max(near - 1, 0)}:
            yield source.rows[place], None
    returned = [budget.row_cost(length) for length in request.lengths_of(target.rows)]
    for place in range(len(costs)) if in_full else {0, len(costs) // 2}:
        near = _first_at_most(returned, costs[place] - gap / 2)
        for back in {near, max(near - 1, 0)}:
            yield source.rows[place], target.rows[back]


def _first_at_most(descending: list[float], limit: float) -> int:
    """Return the first place whose value does not exceed ``limit``, or the last one where there is none."""
    return min(bisect_left(descending, -limit, key=lambda value: -value), len(descending) - 1)


def _exchange(request: RequestBins, source: Bin, target: Bin, row: int, back: int | None, budget: Budget) -> _Move:
    given, taken = {row}, set() if back is None else {back}
    source_rows = sorted({*source.rows, *taken} - given)
    target_rows = sorted({*target.rows, *given} - taken)
    return _Move(
        source,
        target,
        source_rows,
        target_rows,
        budget.load(request.lengths_of(source_rows)),
        budget.load(request.lengths_of(target_rows)),
    )
