"""Rollback of a request: the window as it was at its last good request end (``on_overflow="drop_request"``).

Every request end is checked, with one all-reduce and one host read. A good one is remembered: its bookkeeping at once,
its sums with the first gradient of a further request, so that a window of one request copies nothing. A bad one is
undone.

Memory, from the first window of several requests on: one copy of the sums. On the device in the accumulation dtype;
under CPU offload of the host gradient, in host memory, or of the device partition while that is kept between requests
(``retain_gpu_grad_partition_until_step``, 16-bit masters).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from requestzero.zero.common.norm import cause_of_overflow
from requestzero.zero.common.window import DroppedRequest, UpdateWindow


class RestorableSum(Protocol):
    """One group's sum, as far as going back is concerned."""

    def tensors(self) -> list[torch.Tensor]: ...

    def state(self) -> Any: ...

    def go_back(self, saved: Sequence[torch.Tensor], state: Any) -> None: ...


@dataclass
class GoodEnd:
    """The window at the end of its last good request."""

    window: dict[str, Any]
    states: list[Any]
    copied: bool = False
    """True once the sums are in the backup: further gradients may have changed them."""


class RequestRollback:
    """Remembers and goes back.

    Args:
        sums: by parameter group.
    """

    def __init__(self, sums: Sequence[RestorableSum]) -> None:
        self._sums = sums
        self._good_end: GoodEnd | None = None
        self._backups: list[list[torch.Tensor]] = [[] for _ in sums]

    @property
    def backup_bytes(self) -> int:
        """Bytes of the copy of the window's sums that this rank holds, wherever it lies."""
        return sum(copy.nbytes for copies in self._backups for copy in copies)

    def discard(self) -> None:
        """Forget the last good end: the window is over. The memory of the backup is kept for the next one."""
        self._good_end = None

    def save_sums(self) -> None:
        """Copy the sums of the last good end, unless that is done; called before anything changes them."""
        end = self._good_end
        if end is None or end.copied:
            return
        end.copied = True
        end.states = [each.state() for each in self._sums]  # a user may have set a gradient since
        for index, each in enumerate(self._sums):
            sums, kept = each.tensors(), self._backups[index]
            if [(t.shape, t.device) for t in kept] != [(t.shape, t.device) for t in sums]:
                self._backups[index] = [torch.empty_like(total) for total in sums]
            for copy, total in zip(self._backups[index], sums, strict=True):
                copy.copy_(total, non_blocking=True)

    def remember(self, window: UpdateWindow) -> None:
        """Make the present state of the window the last good end."""
        self._good_end = GoodEnd(window.save(), [each.state() for each in self._sums])

    def check_request(
        self, window: UpdateWindow, squares: Sequence[float], discard: Callable[[], None]
    ) -> DroppedRequest | None:
        """Remember the request that has just ended, or undo it if the sum is not finite now; return it then.

        Args:
            window: the open window, which stays the same object.
            squares: squared norms of all groups' sums over all ranks, as the step would read them.
            discard: forgets all sums, where no good request end is left to go back to.
        """
        cause = cause_of_overflow(squares)
        if cause is None:
            self.remember(window)
            return None
        before = 0 if self._good_end is None else self._good_end.window["micro_batches"]
        dropped = DroppedRequest(window.request_ids[window.requests - 1], window.micro_batches - before, cause)
        self._go_back(window, discard)
        window.dropped.append(dropped)
        return dropped

    def _go_back(self, window: UpdateWindow, discard: Callable[[], None]) -> None:
        end = self._good_end
        if end is None:
            discard()
            window.load(UpdateWindow().save())
            return
        window.load(end.window)
        if end.copied:  # else the request that is undone has not reduced anything
            for each, copies, state in zip(self._sums, self._backups, end.states, strict=True):
                each.go_back(copies, state)
            end.copied = False  # saved anew before the next request: until then a user may set a gradient
