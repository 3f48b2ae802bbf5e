"""The factor that the gradients of a step are divided by: loss scale times divisor, fixed while the step runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch


class StepScale:
    """The loss scale as the optimizer's methods see it.

    ``step`` of DeepSpeed 0.19.8 adjusts a dynamic loss scale before it unscales the gradients, which were computed with
    the scale before the adjustment. While a step runs the scale is therefore fixed, and the divisor is part of it, so
    that norm, clipping and Muon refer to the divided gradient.
    """

    def __init__(self) -> None:
        self._fixed: float | None = None

    @property
    def is_fixed(self) -> bool:
        """True while a step runs."""
        return self._fixed is not None

    def value(self, current: Callable[[], float]) -> float:
        """Return the fixed scale, or what ``current`` gives outside of a step."""
        return current() if self._fixed is None else self._fixed

    @contextmanager
    def fixed(self, value: float) -> Iterator[None]:
        """While the block runs, let the scale be ``value``."""
        self._fixed = value
        try:
            yield
        finally:
            self._fixed = None


def unscale_and_clip(gradients: Sequence[torch.Tensor], scale: float, norm: float, max_norm: float) -> None:
    """Divide gradients in place by scale and clipping factor, in one pass, or in none where their product is 1.

    A true division: multiplying by the reciprocal equals it for powers of two only.

    Args:
        gradients: flat, in the dtype of the master weights.
        scale: loss scale times divisor.
        norm: of the gradient times ``scale``, over all groups and ranks.
        max_norm: the largest norm after the division; 0 for no clipping. A norm that is not finite (where the overflow
            check is off) clips everything to nothing, as in DeepSpeed.
    """
    factor = scale
    if max_norm > 0.0:
        divided = norm / scale
        factor *= max(1.0, (divided + 1e-6) / max_norm) if math.isfinite(divided) else math.inf
    if factor != 1.0:
        for gradient in gradients:
            gradient.data.div_(factor)
