"""One request, cut into micro-batches that are not yet assigned to ranks."""

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
    """Positions of the sequences in the request, the longest sequence first."""
    lengths: list[int]
    """Their tokens, in the same order: descending."""
    micro_batches: int
    """Number of micro-batches on every rank, fillers included."""
    bins: list[Bin]
    """The micro-batches that are no fillers, the heaviest first."""

    def lengths_of(self, rows: Sequence[int]) -> list[int]:
        """Return the tokens of the sequences in ``rows``."""
        return [self.lengths[row] for row in rows]

    def rounds(self, world_size: int) -> list[list[Bin]]:
        """Return the micro-batches that the ranks run at the same time: of similar load, at most one a rank."""
        return [self.bins[start : start + world_size] for start in range(0, len(self.bins), world_size)]


def cut_request(positions: Sequence[int], lengths: Sequence[int], budget: Budget, world_size: int) -> RequestBins:
    """Cut a request into micro-batches; takes n log n time in its number of sequences.

    Args:
        positions: positions of its sequences in the request.
        lengths: tokens of each, in the same order.
        budget: limits of a micro-batch.
        world_size: number of data-parallel ranks.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    descending = [lengths[item] for item in order]
    cut = padded_bins if budget.layout == "padded" else packed_bins
    micro_batches, rows = cut(descending, budget, world_size)
    bins = [Bin(one, budget.load([descending[row] for row in one])) for one in rows]
    bins.sort(key=lambda item: -item.load)
    return RequestBins([positions[item] for item in order], descending, micro_batches, bins)
