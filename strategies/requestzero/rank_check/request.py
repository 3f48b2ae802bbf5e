"""The request at hand, as far as ranks have to agree on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from requestzero.data.micro_batch import RequestId


class Window(Protocol):
    """The part of an update window that ranks compare."""

    @property
    def micro_batches(self) -> int:
        """Backwards since the last step."""


@dataclass
class Request:
    """A request, as announced and as far as it has come."""

    number: int = 0
    """Requests begun so far, this one included."""
    name: RequestId = None
    micro_batches: int | None = None
    """Announced number of micro-batches."""
    window_end: bool | None = None
    """True or false where a step, or none, was announced to follow it."""
    done: int = 0
    """Micro-batches that were run or left out."""
    forwards: int = 0
    """Forwards that were begun for it, where ranks agree on them."""
    closed: bool = True
    """True once its end was marked."""
    aborted: bool = False
    """True once it was aborted."""
    window: Window | None = None
    """The window that was open when it began; a request ends with its window."""

    def __str__(self) -> str:
        return f"request {self.name!r}" if self.name is not None else f"request no. {self.number} (without a name)"

    @property
    def announced(self) -> tuple[int, ...]:
        """The announced properties as numbers, -1 for those that were not announced."""
        return (
            -1 if self.micro_batches is None else self.micro_batches,
            -1 if self.window_end is None else int(self.window_end),
        )

    def ended(self, window: Window) -> bool:
        """Return true if the next micro-batch, in ``window``, belongs to another request."""
        return self.closed or (self.done > 0 and self.window is not window)
