"""Plan the micro-batches of one update window, on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from requestzero.planning.bad_requests import UsableRequest
from requestzero.planning.budget import Budget
from requestzero.planning.naive import naive_count, naive_micro_batches
from requestzero.planning.rank_loads import RankLoads
from requestzero.planning.rebalance import Shares, rebalance
from requestzero.planning.request_bins import RequestBins, cut_request
from requestzero.planning.statistics import Cost


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """One forward and backward of one rank."""

    request: int
    """Index of the request in the dataset."""
    positions: tuple[int, ...]
    """Positions of its sequences in the micro-batch; where ``is_filler``, the shortest one, to be masked."""
    is_filler: bool
    truncated: tuple[int, ...]
    """Those of ``positions`` that are cut to the budget."""
    micro_batches: int
    """Number of micro-batches of the request on this rank, fillers included."""
    request_end: bool
    window_end: bool | None
    """``None`` where windows are left to the training loop."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request on all ranks."""

    index: int
    """Index of the request in the dataset."""
    usable: UsableRequest
    bins: RequestBins
    share: dict[int, list]
    """Rank -> its micro-batches (:class:`~requestzero.planning.request_bins.Bin`); fillers are left out."""

    def positions(self, rank: int) -> list[tuple[int, ...]]:
        """Return the positions of the sequences in each micro-batch of ``rank``; an empty tuple is a filler."""
        bins = self.share.get(rank, [])
        own = [tuple(sorted(self.bins.positions[row] for row in item.rows)) for item in bins]
        return own + [()] * (self.bins.micro_batches - len(own))


@dataclass(frozen=True)
class WindowPlan:
    """The requests of one update window, in order."""

    requests: list[RequestPlan]
    loads: list[tuple[float, int]]
    """``(load, rank)`` of the ranks that have any load, ascending."""
    marked: bool
    """True where the plan knows the window's end; false where the training loop counts requests."""
    complete: bool
    """True where the window ends with its last request; false for what an epoch's end leaves over."""

    def __len__(self) -> int:
        """Return the micro-batches per rank."""
        return sum(request.bins.micro_batches for request in self.requests)

    def micro_batches(self, rank: int, fillers: bool = True) -> Iterator[MicroBatchPlan]:
        """Yield the micro-batches of ``rank``, in order.

        Args:
            rank: data-parallel rank.
            fillers: every rank has equally many, with the same request ends; else only its own, or one filler where
                it has none in the whole window.
        """
        shares_of = [request.positions(rank) for request in self.requests]
        if not fillers:
            shares_of = _without_fillers(shares_of)
        last_request = max((number for number, shares in enumerate(shares_of) if shares), default=0)
        for number, (request, shares) in enumerate(zip(self.requests, shares_of, strict=True)):
            ends_window = self.complete and number == last_request
            for place, positions in enumerate(shares):
                last = place == len(shares) - 1
                chosen = positions or (request.bins.positions[-1],)
                yield MicroBatchPlan(
                    request=request.index,
                    positions=chosen,
                    is_filler=not positions,
                    truncated=tuple(position for position in chosen if position in request.usable.truncated),
                    micro_batches=len(shares),
                    request_end=last,
                    window_end=(last and ends_window) if self.marked else None,
                )


def _without_fillers(shares_of: list[list[tuple[int, ...]]]) -> list[list[tuple[int, ...]]]:
    own = [[positions for positions in shares if positions] for shares in shares_of]
    if own and not any(own):
        own[-1].append(())
    return own


def plan_window(
    requests: Sequence[tuple[int, UsableRequest]],
    budget: Budget,
    world_size: int,
    *,
    first_rank: int = 0,
    marked: bool = True,
    complete: bool = True,
) -> WindowPlan:
    """Assign the requests of a window to the ranks.

    Each request is cut by itself. Then the rounds of all requests, the heaviest first, give their micro-batches to
    the ranks with the least load in the window so far; then single sequences move, see :mod:`.rebalance`. Takes n log n
    time in the number of sequences, and log ``world_size`` for each micro-batch.

    Args:
        requests: index in the dataset and texts, each with at least one text.
        budget: limits of a micro-batch.
        world_size: number of data-parallel ranks.
        first_rank: the rank that gets the window's heaviest micro-batch.
        marked: mark the window's end.
        complete: the last request ends the window.
    """
    cut = [cut_request(item.positions, item.lengths, budget, world_size) for _, item in requests]
    shares, loads = _assign(cut, world_size, first_rank)
    if world_size > 1 and len(loads) == world_size:
        loads = rebalance(cut, shares, loads, budget)
    plans = [RequestPlan(i, u, c, s) for (i, u), c, s in zip(requests, cut, shares, strict=True)]
    return WindowPlan(plans, loads, marked, complete)


def _assign(cut: list[RequestBins], world_size: int, first_rank: int) -> tuple[Shares, list[tuple[float, int]]]:
    shares: Shares = [{} for _ in cut]
    ranks = RankLoads(world_size, first_rank % world_size)
    rounds = [(number, bins) for number, request in enumerate(cut) for bins in request.rounds(world_size)]
    rounds.sort(key=lambda item: -item[1][0].load)  # stable: a request's rounds stay in order
    for number, bins in rounds:
        for rank, item in zip(ranks.add([one.load for one in bins]), bins, strict=True):
            shares[number].setdefault(rank, []).append(item)
    return shares, ranks.ascending


def planned_cost(window: WindowPlan, budget: Budget, world_size: int) -> Cost:
    """Return the cost of a window as planned."""
    computed = micro_batches = real = 0
    for request in window.requests:
        micro_batches += world_size * request.bins.micro_batches
        real += len(request.bins.bins)
        computed += sum(budget.computed(request.bins.lengths_of(item.rows)) for item in request.bins.bins)
    total = sum(load for load, _ in window.loads)
    busiest = window.loads[-1][0] if window.loads else 0.0
    return Cost(computed, micro_batches, micro_batches - real, busiest, total / world_size)


def naive_cost(window: WindowPlan, budget: Budget, world_size: int, sequences: int | None) -> Cost:
    """Return the cost of a window's requests in order, with ``sequences`` per rank and micro-batch, padded.

    ``sequences=None``: as many as make the planned number of micro-batches.
    """
    computed = micro_batches = real = 0
    loads: dict[int, float] = {}
    for request in window.requests:
        lengths = request.usable.lengths
        per_rank = sequences or -(-len(lengths) // (world_size * request.bins.micro_batches))
        micro_batches += naive_count(len(lengths), world_size, per_rank)
        for rank, rows in naive_micro_batches(lengths, world_size, per_rank):
            longest = max(rows)
            real += 1
            computed += len(rows) * longest
            loads[rank] = loads.get(rank, 0.0) + len(rows) * budget.row_cost(longest)
    total = sum(loads.values())
    return Cost(computed, micro_batches, micro_batches - real, max(loads.values(), default=0.0), total / world_size)
