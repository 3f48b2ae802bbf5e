"""Rollback of one request: the window as it was before it (``abort_request``, ``on_overflow="drop_request"``).

The request at hand can be undone until the next one begins. Its bookkeeping is saved at the end of the request before
it. Sums are saved only where nothing else keeps them, with the first reduction that changes them, so that a window of
one request copies nothing:

- gradients that wait on this rank until the request is there to stay are dropped;
- an offloaded partition is dropped where the host gradient still holds the sum of the request before;
- elsewhere the sums are copied: on the device in the accumulation dtype, under CPU offload the host gradient in host
  memory, or the device partition where the host gradient rounds it (16-bit masters).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator

from requestzero.data.micro_batch import RequestId
from requestzero.zero.common import obstacles
from requestzero.zero.common.window import UpdateWindow


class RestorableSum(Protocol):
    """One group's sum, as far as going back is concerned."""

    @property
    def keeps_last_end(self) -> bool: ...

    def tensors(self) -> list[torch.Tensor]: ...

    def state(self) -> Any: ...

    def go_back(self, saved: Sequence[torch.Tensor], state: Any) -> None: ...


class RequestState(Enum):
    """The request at hand."""

    NONE = "none has begun, or the last one was undone"
    OPEN = "it has begun"
    ENDED = "it has ended, and no other has begun"
    KEPT = "likewise, and it is there to stay"


@dataclass
class RequestStart:
    """The window before the request at hand."""

    window: dict[str, Any]
    states: list[Any] | None = None
    """Set once the sums are saved: from then on gradients may change them."""
    lost: bool = False
    """The sums have changed, and were not to be copied."""


class RequestRollback:
    """Remembers and goes back.

    Args:
        sums: by parameter group.
        copies: copy the sums where nothing else keeps them.
    """

    def __init__(self, sums: Sequence[RestorableSum], copies: bool) -> None:
        self._sums, self._copies = sums, copies
        self._backups: list[list[torch.Tensor]] = [[] for _ in sums]
        self._away: set[int] = set()  # groups whose backup was moved from the accelerator
        self._suspended = False
        self.copies = 0
        """Tensors that were copied so far; for measuring."""
        self.discard()

    @property
    def backup_bytes(self) -> int:
        """Bytes of the copy of the window's sums that this rank holds, wherever it lies."""
        return sum(copy.nbytes for copies in self._backups for copy in copies)

    def discard(self) -> None:
        """Forget everything: the window is over. The memory of the backup is kept for the next one."""
        self.state = RequestState.NONE
        self._start: RequestStart | None = None
        self._last_end: dict[str, Any] | None = None
        self._next_is_due = False
        self.obstacle = ""
        """The reason for which the request at hand cannot be undone; empty: none is known."""

    # --- a request --------------------------------------------------------------------------------------------------

    def begin_request(self) -> None:
        """Begin a request, unless one is open: what came before it is there to stay."""
        if self.state is not RequestState.OPEN:
            self._start = None if self._last_end is None else RequestStart(self._last_end)
            self.state, self.obstacle, self._next_is_due = RequestState.OPEN, "", False

    def remember(self, window: UpdateWindow) -> None:
        """Let the requests of a window that was loaded be there to stay."""
        self.state, self._last_end = RequestState.KEPT, window.save()

    def end_request(self, window: UpdateWindow) -> None:
        """Remember the window at a request's end."""
        self.state, self._last_end = RequestState.ENDED, window.save()

    def keep(self) -> None:
        """Let the request at hand be there to stay: its window is saved, or about to be read or applied."""
        if self.state is RequestState.ENDED:
            self.state = RequestState.KEPT

    def note_forward(self) -> None:
        """Note a forward: where the request at hand has ended, it belongs to the next one, which nobody announced."""
        self._next_is_due = self.state in (RequestState.ENDED, RequestState.KEPT)

    def note_edit(self) -> None:
        """Note that a user has set a gradient, which is one of the whole window."""
        if self.state in (RequestState.OPEN, RequestState.ENDED):
            self.obstacle = obstacles.EDITED

    def save_sums(self) -> None:
        """Save the sums as they were before the request at hand, unless that is done; called before they change."""
        start = self._start
        if self._suspended or start is None or start.states is not None or start.lost:
            return
        if not (self._copies or all(each.keeps_last_end for each in self._sums)):
            start.lost = True
            return
        start.states = [each.state() for each in self._sums]  # a user may have set a gradient since the last end
        for index, each in enumerate(self._sums):
            if not each.keeps_last_end:
                self._copy(index, each.tensors())

    @property
    def has_saved_sums(self) -> bool:
        """True if the request at hand changes sums, and the window may go back to those before it."""
        return self._start is not None and self._start.states is not None

    def _copy(self, index: int, sums: list[torch.Tensor]) -> None:
        kept = self._backups[index]
        if [(t.shape, t.device) for t in kept] != [(t.shape, t.device) for t in sums]:
            self._backups[index] = [torch.empty_like(total) for total in sums]
        for copy, total in zip(self._backups[index], sums, strict=True):
            copy.copy_(total, non_blocking=True)
            self.copies += 1

    def move(self, device: str) -> None:
        """Move copies that lie on the accelerator to the host, or those back to ``device``."""
        on_accelerator = get_accelerator().on_accelerator
        self._away |= {index for index, kept in enumerate(self._backups) if any(map(on_accelerator, kept))}
        for index in self._away:
            self._backups[index] = [copy.to(device) for copy in self._backups[index]]
        if device != "cpu":
            self._away.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let the sums change in the block without being saved: by requests that are there to stay."""
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    # --- going back -------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True if a request has begun and not ended."""
        return self.state is RequestState.OPEN

    def is_at_hand(self, window: UpdateWindow) -> bool:
        """Return whether there is a request that may be undone."""
        return self.state in (RequestState.OPEN, RequestState.ENDED) or self.is_next(window)

    @property
    def is_first(self) -> bool:
        """True if the window was empty before the request at hand, so that nothing has to be kept for going back."""
        return self._start is None

    @property
    def is_lost(self) -> bool:
        """True if the sums before the request at hand cannot be had again."""
        return self._start is not None and self._start.lost

    def lose(self) -> None:
        """Note that the sums before the request at hand are kept no longer."""
        if self._start is not None:
            self._start.lost = True

    def is_next(self, window: UpdateWindow) -> bool:
        """Return whether the request at hand is one without a backward whose beginning nobody has announced."""
        if self.state not in (RequestState.ENDED, RequestState.KEPT) or self._last_end is None:
            return False
        return self._next_is_due or window.weights.reported > self._last_end["weights"].reported

    def before(self) -> UpdateWindow:
        """Return the counts of the window before the request at hand."""
        window = UpdateWindow()
        if self._start is not None:
            window.load(self._start.window)
        return window

    def name(self, window: UpdateWindow) -> RequestId:
        """Return the name of the request at hand."""
        number = window.requests if self.is_next(window) else self.before().requests
        return window.request_ids[number] if number < len(window.request_ids) else None

    def undo(self, window: UpdateWindow, discard: Callable[[], None]) -> None:
        """Go back to before the request at hand.

        Args:
            window: the open one, which stays the same object.
            discard: forgets all sums; called where the window was empty before.
        """
        start, end = self._start, self._last_end
        if self.is_next(window):
            assert end is not None
            window.load(end)
        elif start is None:
            discard()
            window.load(UpdateWindow().save())
            end = None
        else:
            self._restore(start)
            window.load(start.window)
            end = start.window
        self.discard()
        self._last_end = end

    def _restore(self, start: RequestStart) -> None:
        if start.states is not None:  # else the request has not reduced anything
            for each, copies, state in zip(self._sums, self._backups, start.states, strict=True):
                each.go_back(copies, state)
