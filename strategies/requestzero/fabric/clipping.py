"""``fabric.clip_gradients``: the norm of a window that waits for its step, and clipping in that step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from requestzero.zero.engine import RequestZeROEngine


class NextStepClipping:
    """The norms at which the next step of each engine clips."""

    def __init__(self) -> None:
        self._asked: dict[RequestZeROEngine, float] = {}

    def ask(self, engine: RequestZeROEngine, max_norm: float) -> None:
        """Let the next step of an engine clip at ``max_norm``, or with infinity as the config says."""
        self.forget(engine)
        if not math.isinf(max_norm):
            self._asked[engine] = float(max_norm)

    def forget(self, engine: RequestZeROEngine) -> None:
        """Let the next step of an engine clip as the config says."""
        self._asked.pop(engine, None)

    @contextmanager
    def applied(self, engine: RequestZeROEngine) -> Iterator[None]:
        """Let the engine's step clip as was asked while the block runs, and forget it then."""
        optimizer, saved = engine.optimizer, engine.optimizer.clip_grad
        optimizer.clip_grad = self._asked.pop(engine, saved)
        try:
            yield
        finally:
            optimizer.clip_grad = saved


def check_norm(engine: RequestZeROEngine, max_norm: float, norm_type: float) -> None:
    """Raise ValueError for another norm than the 2-norm, not a positive number, or another one than the config's."""
    if norm_type != 2:
        raise ValueError(
            f"clip_gradients(norm_type={norm_type!r}) is not possible with ZeRO, which clips by the 2-norm: leave "
            "norm_type out."
        )
    if not max_norm > 0:
        raise ValueError(f"clip_gradients(max_norm={max_norm!r}) is not allowed: use a positive number.")
    configured = float(engine.optimizer.clip_grad)
    if not math.isinf(max_norm) and configured not in (0.0, float(max_norm)):
        raise ValueError(
            f"clip_gradients(max_norm={max_norm!r}) contradicts gradient_clipping={configured!r} of the config, at "
            "which the step clips: use the same value, or leave it out of the config."
        )


def check_finite(norm: torch.Tensor) -> None:
    """Raise RuntimeError for a norm that is not finite, as PyTorch does. Reads it, which waits for the device."""
    if not bool(norm.isfinite()):
        raise RuntimeError(
            f"clip_gradients: the norm of the window's gradient is {float(norm)}. Give error_if_nonfinite=False to let "
            "the overflow policy decide in the step."
        )
