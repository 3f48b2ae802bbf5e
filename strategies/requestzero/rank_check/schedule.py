"""The order in which a backward reduces gradients: the same one as before, or one that ranks have to agree on."""

from __future__ import annotations

Flush = tuple[int, ...]
"""What is reduced at once: DeepSpeed's numbers of the parameters, in order."""


class Schedule:
    """Compares every reduction with the last backward's, which was the same on all ranks.

    Ranks that reduce as before need to agree on nothing. Where ranks leave that order, all of them at the same place
    with the same reductions, their agreement there finds them equal. A rank that leaves it alone states so while the
    others wait in a reduction.
    """

    def __init__(self) -> None:
        self._agreed: list[Flush] = []
        self._now: list[Flush] = []
        self._left = False

    @property
    def reduced(self) -> list[int]:
        """Parameters that this backward has reduced so far, or is about to."""
        return [number for flush in self._now for number in flush]

    def restart(self) -> None:
        """A backward begins; one that was interrupted is forgotten."""
        self._now = []
        self._left = False

    def follows(self, flush: Flush) -> bool:
        """Whether ``flush`` comes next in the order that is known; otherwise this has to be agreed on."""
        position = len(self._now)
        self._now.append(flush)
        self._left = self._left or position >= len(self._agreed) or self._agreed[position] != flush
        return not self._left

    def ends(self) -> bool:
        """Whether the reduction may end here; otherwise this has to be agreed on."""
        return self._now == self._agreed

    def adopt(self) -> None:
        """The reduction has ended on all ranks: its order is the known one from now on."""
        self._agreed = self._now
        self.restart()
