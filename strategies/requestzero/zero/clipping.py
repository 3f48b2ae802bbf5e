"""Clipping that a loop asks for between a window's last backward and its step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from requestzero.zero.common.window import UpdateWindow
    from requestzero.zero.engine import RequestZeROEngine


class NextStepClipping:
    """The norm at which the step of one engine's open window clips in the place of the config's.

    It belongs to the window: one that is discarded takes it along.
    """

    def __init__(self) -> None:
        self._window: UpdateWindow | None = None
        self._max_norm = math.inf
        self._micro_batches = 0
        self._warned = False

    def ask(self, engine: RequestZeROEngine, max_norm: float) -> None:
        """Let the step of the open window clip at ``max_norm``; of several the smallest counts, as in PyTorch.

        Args:
            engine: whose window.
            max_norm: a positive number; infinity changes nothing, and neither does a window without gradients.
        """
        window = engine.update_window
        if window.is_open and not math.isinf(max_norm):
            self._max_norm = min(float(max_norm), self.asked(window) or math.inf)
            self._window, self._micro_batches = window, window.micro_batches

    def begin_backward(self, window: UpdateWindow) -> None:
        """Forget what was asked where nothing of the window is left: its requests have been aborted since."""
        if not window.is_open:
            self._window = None

    def asked(self, window: UpdateWindow) -> float | None:
        """Return the norm that was asked for this window, ``None`` without one."""
        return self._max_norm if window is self._window else None

    @contextmanager
    def applied(self, engine: RequestZeROEngine) -> Iterator[None]:
        """Let the engine's step clip as was asked while the block runs."""
        optimizer, configured, asked = engine.optimizer, engine.optimizer.clip_grad, self.asked(engine.update_window)
        if asked is not None:
            self._warn_of_later_backwards(engine)
            optimizer.clip_grad = asked
        try:
            yield
        finally:
            optimizer.clip_grad = configured

    def _warn_of_later_backwards(self, engine: RequestZeROEngine) -> None:
        later = engine.update_window.micro_batches - self._micro_batches
        if later > 0 and not self._warned and engine.global_rank == 0:
            self._warned = True
            warnings.warn(
                f"{later} backward(s) came after the window's gradient was clipped: the step clips the whole sum, "
                "where PyTorch would have clipped the part before them. Clip once for each step, right before it.",
                stacklevel=2,
            )


def check_max_norm(call: str, max_norm: float, configured: float | None) -> None:
    """Raise ValueError unless the step can clip at ``max_norm``.

    Args:
        call: the name by which a loop asks for it.
        max_norm: as it was given; infinity asks for the norm only.
        configured: ``gradient_clipping`` of the DeepSpeed config, ``None`` where the loop decides.
    """
    if not max_norm > 0:
        raise ValueError(f"{call}(max_norm={max_norm!r}) is not allowed: use a positive number.")
    if not math.isinf(max_norm) and configured not in (None, float(max_norm)):
        raise ValueError(
            f"{call}(max_norm={max_norm!r}) contradicts gradient_clipping={configured!r} of the DeepSpeed config, at "
            "which the step clips: use the same value, or leave it out of the config."
        )


def check_norm_type(call: str, norm_type: float) -> None:
    """Raise ValueError for another norm than the 2-norm, by which ZeRO clips."""
    if norm_type != 2:
        raise ValueError(f"{call}(norm_type={norm_type!r}) is not possible with ZeRO: use the 2-norm.")
