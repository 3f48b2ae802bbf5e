"""Load of every rank in a window so far."""

from __future__ import annotations

import heapq


class RankLoads:
    """Loads of the ranks in a window, kept for those ranks only that have any.

    Args:
        world_size: number of data-parallel ranks.
        first: the rank that gets the first load, so that rank 0 does not get the heaviest of every window.
    """

    def __init__(self, world_size: int, first: int = 0) -> None:
        self.world_size = world_size
        self._first = first
        self._used = 0
        self._loads: list[tuple[float, int]] = []

    def add(self, loads: list[float]) -> list[int]:
        """Give each load, the heaviest first, to another one of the least loaded ranks, and return those ranks."""
        taken = [self._least() for _ in loads]
        for (before, rank), load in zip(taken, loads, strict=True):
            heapq.heappush(self._loads, (before + load, rank))
        return [rank for _, rank in taken]

    def _least(self) -> tuple[float, int]:
        if self._used == self.world_size:
            return heapq.heappop(self._loads)
        self._used += 1
        return 0.0, (self._first + self._used - 1) % self.world_size

    @property
    def ascending(self) -> list[tuple[float, int]]:
        """``(load, rank)`` of the ranks that have any load, the least loaded first."""
        return sorted(self._loads)
