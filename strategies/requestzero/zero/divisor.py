"""What the window's gradient sum is divided by, agreed upon by all ranks along with the norms of the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.utils import get_norm_dtype

from requestzero.zero.windowed import WindowedOptimizer

DIVISOR_ENTRIES = 3
"""Numbers that :meth:`WindowDivisor.put_divisor` adds to what is summed over ranks."""


class WindowDivisor(WindowedOptimizer):
    """Either a number that all ranks have to give alike, or the total weight of all ranks' micro-batches."""

    def put_divisor(self, sums: torch.Tensor, place: int = 0) -> None:
        """Write this rank's entries into ``sums``, zeros on the device, from ``place`` on. Reads nothing.

        That is its divisor and the square of it, or its weight and the micro-batches without one, and then 1.
        """
        window = self.window
        if window.by_weight:
            sums[place] = window.host_weight
            if window.device_weight is not None:
                sums[place].add_(window.device_weight)
            sums[place + 1] = abs(window.micro_batches - window.reported_weights)
        else:
            sums[place] = window.divisor
            sums[place + 1] = window.divisor**2
        sums[place + 2] = 1

    def take_divisor(self, entries: Sequence[float]) -> None:
        """Judge the entries summed over ranks; the total weight becomes the window's divisor.

        Raises:
            RuntimeError: on all ranks, if they give different divisors, if a micro-batch has no weight or more than
                one, or if a weight is negative, infinite or NaN.
        """
        first, second, ranks = entries
        if self.window.by_weight:
            self._take_weight(first, second, ranks)
            return
        rounding = 1e-12 if get_norm_dtype() == torch.double else 1e-5
        # Not only above: a rank that divides by weights has put something else there.
        if abs(ranks * second - first**2) > rounding * first**2:
            raise RuntimeError(
                f"The ranks divide the update window by different numbers (this rank by {self.window.divisor:g}, on "
                f"average by {first / ranks:g}): have all of them run the same micro-batches, and give step() the "
                "same divisor."
            )

    def _take_weight(self, weight: float, wrong: float, ranks: float) -> None:
        window = self.window
        if wrong:
            raise RuntimeError(
                f"normalization='token' divides by the weights of the micro-batches, but {wrong:g} over all ranks have "
                f"none or more than one (this rank: {window.reported_weights} weights for {window.micro_batches} "
                "micro-batches): report exactly one for each, with MicroBatch(weight=...), engine.backward(loss, "
                "weight=...) or add_weight(...)."
            )
        per_rank = weight / ranks  # and per replica, where model-parallel ranks repeat the weights of their replica
        divisor = per_rank * self._mean_to_sum()
        if not (divisor == 0 or torch.finfo(torch.float32).tiny <= divisor <= torch.finfo(torch.float32).max):
            raise RuntimeError(
                f"The weights of the update window's micro-batches add up to {weight:g} over all ranks: a weight is "
                "negative, infinite or NaN, or their sum is out of fp32's range. Report finite numbers of at least 0."
            )
        window.total_weight = per_rank * dist.get_world_size(group=self.dp_process_group)
        window.divisor = divisor

    def _mean_to_sum(self) -> float:
        """Mean weight per rank times this is the divisor for what the reduction gives.

        DeepSpeed divides the sum over ranks by their number, sequence-parallel ranks counted as one
        (``prescale_gradients`` and ``gradient_predivide_factor`` only move that division), or not at all with
        ``gradient_allreduce_op: "sum"``.
        """
        if not self.gradient_average:
            return float(dist.get_world_size(group=self.dp_process_group))
        return float(self.sequence_parallel_size)

    def reduce_divisor(self) -> None:
        """Sum and judge the entries by themselves, where the norms cannot be read with them (collective, one read).

        Raises:
            RuntimeError: on all ranks, see :meth:`take_divisor`.
        """
        device = get_accelerator().current_device_name()
        entries = torch.zeros(DIVISOR_ENTRIES, dtype=get_norm_dtype(), device=device)
        self.put_divisor(entries)
        self.comm.all_reduce(entries, op=dist.ReduceOp.SUM, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=entries, op=dist.ReduceOp.SUM)
        self.agreement.wait_for_device(entries.device)
        self.take_divisor(entries.tolist())
