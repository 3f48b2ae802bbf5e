"""The order in which a backward reduces gradients: the same as before, or one that ranks have to agree on."""

from __future__ import annotations

Flush = tuple[int, ...]
"""Parameters that are reduced at once: DeepSpeed's numbers of them, in order."""


class ReductionOrder:
    """Compares every reduction with the last backward's, which was the same on all ranks.

    Ranks that reduce as before need to agree on nothing. Where all ranks leave that order at the same place with the
    same reductions, their comparison there finds them equal. A rank that leaves it alone compares while the others wait
    in a reduction.
    """

    def __init__(self) -> None:
        self._agreed: list[Flush] = []
        self._current: list[Flush] = []
        self._left = False

    @property
    def reduced(self) -> list[int]:
        """Parameters that this backward has reduced so far, or is about to."""
        return [number for flush in self._current for number in flush]

    def restart(self) -> None:
        """Begin a backward; forget one that was interrupted."""
        self._current = []
        self._left = False

    def follows(self, flush: Flush) -> bool:
        """Add ``flush``; return true if it comes next in the order that all ranks know."""
        position = len(self._current)
        self._current.append(flush)
        self._left = self._left or position >= len(self._agreed) or self._agreed[position] != flush
        return not self._left

    def ends(self) -> bool:
        """Return true if the order that all ranks know ends here."""
        return self._current == self._agreed

    def adopt(self) -> None:
        """Make the order of this backward, which has ended on all ranks, the one that all ranks know."""
        self._agreed = self._current
        self.restart()
