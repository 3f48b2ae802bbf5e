"""The loops over a batch, in automatic and in manual optimization, which go by update windows here.

Written for Lightning 2.6.6.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import ManualResult, _ManualOptimization
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim import Optimizer
from typing_extensions import override

from requestzero.errors import AbortRequest
from requestzero.lightning.window_driver import WindowDriver, driver_of


class UndividedResult(ClosureResult):
    """The loss as ``training_step`` returned it. Lightning's is divided by ``accumulate_grad_batches``."""

    @classmethod
    @override
    def from_training_step_output(cls, training_step_output: STEP_OUTPUT, normalize: int = 1) -> ClosureResult:
        """Ignore ``normalize``: the window's sum is divided once, by the step."""
        raise_if_abort(training_step_output)
        return super().from_training_step_output(training_step_output)


class ManualRequestResult(ManualResult):
    """Also knows a ``training_step`` that aborts its request by what it returns."""

    @classmethod
    @override
    def from_training_step_output(cls, training_step_output: STEP_OUTPUT) -> ManualResult:
        """Raise an ``AbortRequest`` that was returned."""
        raise_if_abort(training_step_output)
        return super().from_training_step_output(training_step_output)


def raise_if_abort(output: object) -> None:
    """Raise an ``AbortRequest`` that ``training_step`` has returned, or its class."""
    if isinstance(output, AbortRequest) or output is AbortRequest:
        raise output


class RequestClosure(Closure):
    """The closure of a batch whose request may be aborted: the rest of it does nothing then.

    Args:
        closure: Lightning's.
        driver: of the strategy.
    """

    def __init__(self, closure: Closure, driver: WindowDriver) -> None:
        super().__init__(closure._step_fn, closure._backward_fn, closure._zero_grad_fn)
        self._driver = driver

    @override
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Return a result without a loss for an aborted request."""
        if not self._driver.request_aborted:
            with self._driver.aborting():
                return super().closure(*args, **kwargs)
        return UndividedResult(closure_loss=None)


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
    def _make_closure(self, kwargs: OrderedDict, optimizer: Optimizer, batch_idx: int) -> Closure:
        """Let ``training_step`` abort its request."""
        return RequestClosure(super()._make_closure(kwargs, optimizer, batch_idx), driver_of(self.trainer))

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

    output_result_cls = ManualRequestResult

    @override
    def advance(self, kwargs: OrderedDict) -> None:
        """Also let ``training_step`` abort its request; further batches of that request are left out."""
        driver = driver_of(self.trainer)
        if not driver.request_aborted:
            with driver.aborting():
                super().advance(kwargs)

    @override
    def run(self, kwargs: OrderedDict) -> dict[str, Any]:
        """Also end the batch's request, now that all of its backwards have run."""
        outputs = super().run(kwargs)
        driver_of(self.trainer).end_batch(is_last=self.trainer.fit_loop.epoch_loop._num_ready_batches_reached())
        return outputs
