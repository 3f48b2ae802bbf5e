"""The loops over a batch, in automatic and in manual optimization, which go by update windows here.

Written for Lightning 2.6.6.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim import Optimizer
from typing_extensions import override

from requestzero.lightning.window_driver import driver_of


class UndividedResult(ClosureResult):
    """The loss as ``training_step`` returned it. Lightning's is divided by ``accumulate_grad_batches``."""

    @classmethod
    @override
    def from_training_step_output(cls, training_step_output: STEP_OUTPUT, normalize: int = 1) -> ClosureResult:
        """Ignore ``normalize``: the window's sum is divided once, by the step."""
        return super().from_training_step_output(training_step_output)


class WindowAutomaticOptimization(_AutomaticOptimization):
    """Differs in the divisor of the loss (none) and in when gradients are cleared (at a window's start)."""

    output_result_cls = UndividedResult

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict) -> dict[str, Any]:
        """Also drop the epoch's last, shorter window where the user wants that."""
        outputs = super().run(optimizer, batch_idx, kwargs)
        driver_of(self.trainer).end_batch(is_last=self.trainer.fit_loop.epoch_loop._num_ready_batches_reached())
        return outputs

    @override
    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        """Clear gradients once per window. Lightning's version may do so within one, which would discard it."""
        if self._skip_backward or not driver_of(self.trainer).marks.starts_window:
            return None

        def zero_grad() -> None:
            self._on_before_zero_grad(optimizer)
            self._optimizer_zero_grad(batch_idx, optimizer)

        return zero_grad


class WindowManualOptimization(_ManualOptimization):
    """Differs in that a batch is a request, whatever its number of backwards."""

    @override
    def run(self, kwargs: OrderedDict) -> dict[str, Any]:
        """Also end the batch's request, now that all of its backwards have run."""
        outputs = super().run(kwargs)
        driver_of(self.trainer).end_batch(is_last=self.trainer.fit_loop.epoch_loop._num_ready_batches_reached())
        return outputs
