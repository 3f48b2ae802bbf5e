"""One request, cut into micro-batches that are not yet given to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from requestzero.planning.budget import Budget
from requestzero.planning.packed_bins import packed_bins
from requestzero.planning.padded_bins import padded_bins


@dataclass(slots=True)
class Bin:
    """The sequences of one micro-batch on one rank."""

    rows: list[int]
    """Places in the request's ``lengths``, ascending: the longest sequence first."""
    load: float
    """Cost, see :meth:`~requestzero.planning.budget.Budget.load`."""


@dataclass(slots=True)
class RequestBins:
    """Micro-batches of one request."""

    positions: list[int]
    """Where the sequences stand in the request, the longest sequence first."""
    lengths: list[int]
    """Their tokens, in the same order: descending."""
    micro_batches: int
    """On every rank, fillers included."""
    bins: list[Bin]
    """The heaviest first."""

    def lengths_of(self, rows: Sequence[int]) -> list[int]:
        return [self.lengths[row] for row in rows]

    def rounds(self, world_size: int) -> list[list[Bin]]:
        """What the ranks run at the same time: micro-batches of similar load, at most one a rank."""
        return [self.bins[start : start + world_size] for start in range(0, len(self.bins), world_size)]


def cut_request(positions: Sequence[int], lengths: Sequence[int], budget: Budget, world_size: int) -> RequestBins:
    """Cut a request whose sequence at ``positions[i]`` has ``lengths[i]`` tokens; n log n in their number."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    descending = [lengths[item] for item in order]
    cut = padded_bins if budget.layout == "padded" else packed_bins
    micro_batches, rows = cut(descending, budget, world_size)
    bins = [Bin(one, budget.load([descending[row] for row in one])) for one in rows]
    bins.sort(key=lambda item: -item.load)
    return RequestBins([positions[item] for item in order], descending, micro_batches, bins)
