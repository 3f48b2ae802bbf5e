"""Clipping that a loop asks for between a window's last backward and its step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from deepspeed import comm as dist

from requestzero.zero.common.user_line import stacklevel_of_user
from requestzero.zero.common.window import UpdateWindow


class ClipsInStep(Protocol):
    """An optimizer whose step clips."""

    clip_grad: float
    window: UpdateWindow


class NextStepClipping:
    """The norm at which the step of one engine's open window clips, unless that of the config is smaller.

    It belongs to the window: one that is discarded takes it along.
    """

    def __init__(self) -> None:
        self._window: UpdateWindow | None = None
        self._max_norm = math.inf
        self._micro_batches = 0
        self._warned = False

    def ask(self, window: UpdateWindow, max_norm: float) -> None:
        """Let the step of the open window clip at ``max_norm``; of several the smallest counts, as in PyTorch.

        Args:
            window: the open one.
            max_norm: a positive number; infinity changes nothing, and neither does a window without gradients.
        """
        if window.is_open and not math.isinf(max_norm):
            self._max_norm = min(float(max_norm), self.asked(window) or math.inf)
            self._window, self._micro_batches = window, window.micro_batches

    def forget(self) -> None:
        """Forget what was asked: it is done, or the requests that it was for have been aborted."""
        self._window = None

    def asked(self, window: UpdateWindow) -> float | None:
        """Return the norm that was asked for this window, ``None`` without one."""
        return self._max_norm if window is self._window else None

    def take(self, window: UpdateWindow) -> float | None:
        """Return the norm that was asked for this window, and forget it: the caller clips."""
        asked = self.asked(window)
        self.forget()
        return asked

    @contextmanager
    def applied(self, optimizer: ClipsInStep) -> Iterator[None]:
        """Let the optimizer's step clip as was asked, and as the config says, while the block runs."""
        configured, asked = optimizer.clip_grad, self.asked(optimizer.window)
        if asked is not None:
            self._warn_of_later_backwards(optimizer.window)
            optimizer.clip_grad = min(asked, configured) if configured > 0 else asked
        try:
            yield
        finally:
            optimizer.clip_grad = configured

    def _warn_of_later_backwards(self, window: UpdateWindow) -> None:
        later = window.micro_batches - self._micro_batches
        if later > 0 and not self._warned and dist.get_rank() == 0:
            self._warned = True
            warnings.warn(
                f"{later} backward(s) came after the window's gradient was clipped: the step clips the whole sum, "
                "where PyTorch would have clipped the part before them. Clip once for each step, right before it.",
                stacklevel=stacklevel_of_user(),
            )
