"""The divisor of a window's gradient sum, agreed on by all ranks in the all-reduce of the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from deepspeed.runtime.zero.utils import get_norm_dtype

from requestzero.zero.common.window import UpdateWindow


class StepDivisor:
    """Either a number that all ranks give alike, or the total weight of all ranks' micro-batches.

    Args:
        ranks: number of data-parallel ranks.
        mean_to_sum: mean weight per rank times this is the divisor for the reduced gradient. DeepSpeed divides the sum
            over ranks by their number, sequence-parallel ranks counted as one, or by nothing with
            ``gradient_allreduce_op: "sum"``.
    """

    ENTRIES = 3
    """Numbers that :meth:`write` adds to the all-reduce of a step."""

    def __init__(self, ranks: int, mean_to_sum: float) -> None:
        self._ranks, self._mean_to_sum = ranks, mean_to_sum
        self.value = 1.0
        """The divisor of the step at hand."""
        self.by_weight = False
        """True where the divisor follows from the weights of all ranks' micro-batches."""
        self.total_weight: float | None = None
        """Weight of the window over all ranks, once a step that divides by it has read it."""

    def reset(self) -> None:
        """Forget the divisor of the last step."""
        self.value, self.by_weight, self.total_weight = 1.0, False, None

    def choose(self, value: float) -> None:
        """Divide the next step by ``value``."""
        self.value, self.by_weight = value, False

    def write(self, sums: torch.Tensor, place: int, window: UpdateWindow) -> None:
        """Write this rank's entries into ``sums``, zeros on the device, from ``place`` on. Reads nothing.

        They are its divisor and the square of it, or its weight and the micro-batches without one; then 1.
        """
        if self.by_weight:
            weights = window.weights
            sums[place] = weights.on_host
            if weights.on_device is not None:
                sums[place].add_(weights.on_device)
            sums[place + 1] = abs(window.micro_batches - weights.reported)
        else:
            sums[place] = self.value
            sums[place + 1] = self.value**2
        sums[place + 2] = 1

    def check(self, entries: Sequence[float], window: UpdateWindow) -> None:
        """Check the entries summed over ranks; with weights, their sum gives the divisor.

        Raises:
            RuntimeError: on all ranks, if they give different divisors, if a micro-batch has no weight or more than
                one, or if a weight is negative, infinite or NaN.
        """
        first, second, ranks = entries
        if self.by_weight:
            self._resolve_weight(first, second, ranks, window)
            return
        rounding = 1e-12 if get_norm_dtype() == torch.double else 1e-5
        # Compared on both sides: a rank that divides by weights has written something else there.
        if abs(ranks * second - first**2) > rounding * first**2:
            raise RuntimeError(
                f"The ranks divide the update window by different numbers (this rank by {self.value:g}, on "
                f"average by {first / ranks:g}): have all of them run the same micro-batches, and give step() the "
                "same divisor."
            )

    def _resolve_weight(self, weight: float, wrong: float, ranks: float, window: UpdateWindow) -> None:
        if wrong:
            raise RuntimeError(
                f"normalization='token' divides by the weights of the micro-batches, but {wrong:g} over all ranks have "
                f"none or more than one (this rank: {window.weights.reported} weights for {window.micro_batches} "
                "micro-batches): report exactly one for each, with MicroBatch(weight=...), engine.backward(loss, "
                "weight=...) or add_weight(...)."
            )
        per_rank = weight / ranks  # and per replica, where model-parallel ranks repeat the weights of their replica
        divisor = per_rank * self._mean_to_sum
        if not (divisor == 0 or torch.finfo(torch.float32).tiny <= divisor <= torch.finfo(torch.float32).max):
            raise RuntimeError(
                f"The weights of the update window's micro-batches add up to {weight:g} over all ranks: a weight is "
                "negative, infinite or NaN, or their sum is out of fp32's range. Report finite numbers of at least 0."
            )
        self.total_weight = per_rank * self._ranks
        self.value = divisor
