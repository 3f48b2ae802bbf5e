"""Plan a dataset's epochs as windows of micro-batches, one window at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from requestzero.planning.bad_requests import BadRequestPolicy, UsableRequest, usable
from requestzero.planning.budget import Budget
from requestzero.planning.order import RequestOrder
from requestzero.planning.request_bins import cut_request
from requestzero.planning.statistics import PlanStatistics
from requestzero.planning.window_plan import WindowPlan, naive_cost, plan_window, planned_cost
from requestzero.planning.windows import WindowRule


@dataclass(frozen=True)
class PlannedWindow:
    """A window's plan, and its end in the epoch."""

    plan: WindowPlan
    next_place: int
    """Place in the epoch's order after the window."""
    statistics: PlanStatistics


@dataclass
class _Gathered:
    """Requests of the window that is being read."""

    requests: list[tuple[int, UsableRequest]] = field(default_factory=list)
    tokens: int = 0
    skipped_requests: int = 0
    skipped_texts: int = 0


@dataclass(frozen=True)
class Planner:
    """Planner of epochs, from lengths alone. It holds one window at a time in memory.

    Deterministic: the order of the requests and their windows follow from ``(seed, epoch)``, and the ranks' shares from
    these and ``world_size``.
    """

    size: int
    """Requests in the dataset."""
    lengths: Callable[[int], Sequence[int]]
    """Tokens of each text of a request, by its index. Called once for each time that the request is planned."""
    budget: Budget
    windows: WindowRule = field(default_factory=WindowRule)
    trainable: Callable[[int], Sequence[int]] | None = None
    """Tokens to train on of each text of a request; ``None``: not known, so that nothing is found untrainable."""
    name: Callable[[int], str | int] = int
    """Name of a request, for messages."""
    policy: BadRequestPolicy = field(default_factory=BadRequestPolicy)
    left_out: Collection[int] = ()
    """Indices of requests that are left out, and counted as skipped."""
    naive_sequences: int | None = None
    """Sequences per rank and micro-batch in the naive comparison; ``None``: the budget's, or as many as make the
    planned number of micro-batches."""
    shuffle: bool = True
    seed: int = 0

    def epoch(self, epoch: int, world_size: int, place: int = 0) -> Iterator[PlannedWindow]:
        """Yield the windows of ``epoch`` from ``place`` on.

        The last one may be incomplete, or have no request where only skipped ones were left.

        Args:
            epoch: number of the epoch, which chooses the order of the requests.
            world_size: number of data-parallel ranks.
            place: place in the epoch's order at which a window starts.

        Raises:
            ValueError: a bad request, see :class:`~requestzero.planning.bad_requests.BadRequestPolicy`.
        """
        order = RequestOrder(self.size, self.seed, epoch, self.shuffle)
        while place < self.size:
            start, gathered, complete = place, _Gathered(), False
            while place < self.size and not complete:
                self._gather(gathered, order[place])
                place += 1
                complete = self.windows.is_complete(len(gathered.requests), gathered.tokens)
            yield self._planned(gathered, complete, start, place, world_size)

    def count_micro_batches(self, world_size: int) -> int:
        """Return the micro-batches per rank in any epoch; plans every request once.

        Raises:
            ValueError: see :meth:`epoch`.
        """
        gathered, count = _Gathered(), 0
        for index in range(self.size):
            self._gather(gathered, index)
            for _, request in gathered.requests:
                count += cut_request(request.positions, request.lengths, self.budget, world_size).micro_batches
            gathered.requests.clear()
        return count

    def _gather(self, gathered: _Gathered, index: int) -> None:
        if index in self.left_out:
            gathered.skipped_requests += 1
            return
        trainable = None if self.trainable is None else self.trainable(index)
        request = usable(self.name(index), self.lengths(index), trainable, self.budget.tokens, self.policy)
        gathered.skipped_texts += request.skipped_texts
        if not request.positions:
            gathered.skipped_requests += 1
            return
        gathered.requests.append((index, request))
        gathered.tokens += sum(request.lengths)

    def _planned(self, gathered: _Gathered, complete: bool, start: int, place: int, world_size: int) -> PlannedWindow:
        plan = plan_window(
            gathered.requests,
            self.budget,
            world_size,
            first_rank=start,
            marked=self.windows.marks,
            complete=complete,
        )
        statistics = PlanStatistics(
            windows=1 if gathered.requests else 0,
            requests=len(gathered.requests),
            sequences=sum(len(request.lengths) for _, request in gathered.requests),
            tokens=gathered.tokens,
            skipped_requests=gathered.skipped_requests,
            skipped_texts=gathered.skipped_texts,
            truncated_texts=sum(len(request.truncated) for _, request in gathered.requests),
            planned=planned_cost(plan, self.budget, world_size),
            naive=naive_cost(plan, self.budget, world_size, self.naive_sequences or self.budget.sequences),
        )
        return PlannedWindow(plan, place, statistics)
