"""Lightning's training loops, which go by update windows here.

Written for Lightning 2.6.6, in whose loops a window is ``accumulate_grad_batches`` batches. Everything that goes by
updates there (steps, hooks, counters, schedulers, loggers) asks one of the few methods below. The objects of the
Trainer stay the same ones and only become instances of these classes, so that state which they hold, or which is
restored into them, is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim import Optimizer
from typing_extensions import override

from requestzero.lightning.window_driver import driver_of


def extend_loops(trainer: pl.Trainer) -> None:
    """Make the Trainer's loops instances of the classes below. Doing it again changes nothing.

    Raises:
        TypeError: a loop is not Lightning's own.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    _become(epoch_loop, WindowEpochLoop)
    cast(WindowEpochLoop, epoch_loop).validation_due = False
    _become(epoch_loop.automatic_optimization, WindowAutomaticOptimization)
    _become(epoch_loop.manual_optimization, WindowManualOptimization)
    _become(trainer._logger_connector, WindowLoggerConnector)


def _become(instance: Any, cls: type) -> None:
    (lightnings,) = cls.__bases__
    if type(instance) not in (cls, lightnings):
        raise TypeError(
            f"The Trainer's {type(instance).__name__} is not Lightning's own {lightnings.__name__}, which "
            "RequestZeRO extends: leave the Trainer's loops as they are."
        )
    instance.__class__ = cls


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


class WindowEpochLoop(_TrainingEpochLoop):
    """Goes by update windows where Lightning's version goes by ``accumulate_grad_batches`` batches."""

    validation_due = False

    @override
    def run(self, data_fetcher: _DataFetcher) -> None:
        """Also leave no window open behind the epoch, and tell the other ranks of its end or of an exception in it."""
        try:
            super().run(data_fetcher)
        except Exception as error:  # not an interrupt or a signal, which Lightning handles
            driver_of(self.trainer).fail(error)
            raise
        driver_of(self.trainer).end_epoch()

    @override
    def _broadcast_sigterm_tensor(self) -> None:
        """Broadcast in a wait that ends where the ranks are in different collectives.

        Lightning's version, which comes before every batch, waits without end and swallows errors; it runs where there
        has been a signal.
        """
        engine = driver_of(self.trainer).engine
        if engine is None or not engine.agreement.active:
            super()._broadcast_sigterm_tensor()
            return
        device = self.trainer.strategy.root_device
        received = torch.tensor([int(getattr(self.trainer, "received_sigterm", False))], device=device)
        engine.agreement.wait_for_batch(torch.distributed.broadcast(received, src=0, async_op=True), device)
        if received.item():
            super()._broadcast_sigterm_tensor()

    @override
    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Also forget a validation that an earlier epoch has left undone, and warn of a loader that cannot resume."""
        super().on_run_start(data_fetcher)
        self.validation_due = False
        loaders = data_fetcher.combined_loader.flattened
        if data_fetcher.length is None and any(isinstance(loader, _Stateful) for loader in loaders):
            rank_zero_warn(
                "The training loader has state_dict() but no length. Lightning fetches one batch ahead of "
                "such a loader, so a resumed run would leave one batch out: give the loader a __len__."
            )

    @override
    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Also discard a window that will get no step, before validation and its checkpoints.

        Validation waits for an open window's end, so the one at the epoch's end would be lost with it.
        """
        if self.trainer.should_stop and self.trainer.fit_loop._can_stop_early:
            driver_of(self.trainer).discard_window("training stops before the window's end")
        elif self._num_ready_batches_reached():
            driver_of(self.trainer).end_data()
            driver_of(self.trainer).discard_window("the epoch ends inside it")
        super().on_advance_end(data_fetcher)

    @override
    def _accumulated_batches_reached(self) -> bool:
        """Lightning's version compares counts of batches."""
        return driver_of(self.trainer).is_complete

    @override
    def _should_accumulate(self) -> bool:
        """Lightning's version steps at an epoch's last batch in any case; here the settings decide."""
        if driver_of(self.trainer).steps_incomplete_windows:
            return super()._should_accumulate()
        return not self._accumulated_batches_reached()

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Leave ``interval="step"`` schedulers where they are after a step that DeepSpeed skipped."""
        if interval == "step" and driver_of(self.trainer).holds_schedulers:
            return
        super().update_lr_schedulers(interval, update_plateau_schedulers)

    @override
    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        """Let a validation that is due inside a window wait for its end."""
        due = super()._should_check_val_fx(data_fetcher)
        if self.restarting:
            return due
        self.validation_due = self.validation_due or due
        if driver_of(self.trainer).is_open:
            return False
        due, self.validation_due = self.validation_due, False
        return due


class WindowLoggerConnector(_LoggerConnector):
    """Logs once per window in manual optimization too, and adds the strategy's metrics of the update.

    A metric on the device is read where Lightning reads those of the module.
    """

    @property
    @override
    def metrics(self) -> _METRICS:
        """In training steps also the strategy's metrics, except for names that the module or a callback logs."""
        metrics = super().metrics
        if self.trainer.training and self._first_loop_iter is not None:
            assert self.trainer._results is not None
            taken = {result.meta.name for result in self.trainer._results.values()}
            own = {name: v for name, v in driver_of(self.trainer).logged_metrics.items() if name not in taken}
            metrics["log"].update(own)
            metrics["callback"].update(own)
        return metrics

    @override
    def update_train_step_metrics(self) -> None:
        """Lightning's version logs for every batch in manual optimization."""
        if not self.trainer.fit_loop._should_accumulate():
            super().update_train_step_metrics()
