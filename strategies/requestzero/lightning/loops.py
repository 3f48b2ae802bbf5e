"""Lightning's training loops, told where update windows end.

Written for Lightning 2.6.6, whose loops take a window to be ``accumulate_grad_batches`` batches. Everything
that goes by updates there (steps, hooks, counters, schedulers, loggers) asks one of the few methods below.
The objects of the Trainer stay the same ones and only become instances of these classes, so that state which
they hold, or which is restored into them, is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

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

if TYPE_CHECKING:
    from requestzero.lightning.strategy import RequestZeRO


def take_over_loops(trainer: pl.Trainer) -> None:
    """Make the Trainer's loops those below. Doing it again changes nothing.

    Raises:
        TypeError: somebody has put another loop in their place.
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


def _strategy(trainer: pl.Trainer) -> RequestZeRO:
    return cast("RequestZeRO", trainer.strategy)


class UndividedResult(ClosureResult):
    """The loss as ``training_step`` returned it: the window's sum is divided once, by the step."""

    @classmethod
    @override
    def from_training_step_output(cls, training_step_output: STEP_OUTPUT, normalize: int = 1) -> ClosureResult:
        return super().from_training_step_output(training_step_output)


class WindowAutomaticOptimization(_AutomaticOptimization):
    """Differs in the divisor of the loss (none) and in when gradients are cleared (at a window's start)."""

    output_result_cls = UndividedResult

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict) -> dict[str, Any]:
        """Also drop the epoch's last, shorter window where the user wants that."""
        outputs = super().run(optimizer, batch_idx, kwargs)
        _strategy(self.trainer).after_batch(is_last=self.trainer.fit_loop.epoch_loop._num_ready_batches_reached())
        return outputs

    @override
    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        """Once per window. Lightning's version also acts within one, which would discard its gradients."""
        if self._skip_backward or not _strategy(self.trainer).marks.starts_window:
            return None

        def zero_grad() -> None:
            self._on_before_zero_grad(optimizer)
            self._optimizer_zero_grad(batch_idx, optimizer)

        return zero_grad


class WindowManualOptimization(_ManualOptimization):
    """Also ends the request of a batch once the user's ``training_step`` has run all of its backwards."""

    @override
    def run(self, kwargs: OrderedDict) -> dict[str, Any]:
        outputs = super().run(kwargs)
        _strategy(self.trainer).after_batch(is_last=self.trainer.fit_loop.epoch_loop._num_ready_batches_reached())
        return outputs


class WindowEpochLoop(_TrainingEpochLoop):
    """Goes by update windows where Lightning's version goes by ``accumulate_grad_batches`` batches."""

    validation_due = False

    @override
    def run(self, data_fetcher: _DataFetcher) -> None:
        """Also leave no window open behind the epoch, and tell the other ranks of its end or of an exception in it."""
        try:
            super().run(data_fetcher)
        except Exception as error:  # not an interrupt or a signal, which Lightning sees to
            _strategy(self.trainer).fail(error)
            raise
        _strategy(self.trainer).end_epoch()

    @override
    def _broadcast_sigterm_tensor(self) -> None:
        """Lightning's collective before every batch, in a wait that ends where ranks wait for different things.

        Lightning's version waits without end and swallows errors; it runs where there has been a signal.
        """
        engine = _strategy(self.trainer).engine
        if engine is None or not engine.agreement.active:
            super()._broadcast_sigterm_tensor()
            return
        device = _strategy(self.trainer).root_device
        received = torch.tensor([int(getattr(self.trainer, "received_sigterm", False))], device=device)
        engine.agreement.wait_for_batch(torch.distributed.broadcast(received, src=0, async_op=True), device)
        if received.item():
            super()._broadcast_sigterm_tensor()

    @override
    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Also start without a validation that an earlier epoch has left undone, and look at the loader."""
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
        """Also discard a window that can get no step any more, before validation and its checkpoints.

        Validation waits for an open window's end, so the one at the epoch's end would be lost with it.
        """
        if self.trainer.should_stop and self.trainer.fit_loop._can_stop_early:
            _strategy(self.trainer).discard_window("training stops before the window's end")
        elif self._num_ready_batches_reached():
            _strategy(self.trainer).end_data()
            _strategy(self.trainer).discard_window("the epoch ends inside it")
        super().on_advance_end(data_fetcher)

    @override
    def _accumulated_batches_reached(self) -> bool:
        return _strategy(self.trainer).window_complete

    @override
    def _should_accumulate(self) -> bool:
        """Lightning steps at an epoch's last batch in any case; here only where that is wanted."""
        if _strategy(self.trainer).steps_incomplete_windows:
            return super()._should_accumulate()
        return not self._accumulated_batches_reached()

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """A step that DeepSpeed skipped (gradients not finite) moves no ``interval="step"`` scheduler."""
        if interval == "step" and _strategy(self.trainer).holds_schedulers:
            return
        super().update_lr_schedulers(interval, update_plateau_schedulers)

    @override
    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        """A check that falls inside a window waits for its end."""
        due = super()._should_check_val_fx(data_fetcher)
        if self.restarting:
            return due
        self.validation_due = self.validation_due or due
        if _strategy(self.trainer).window_open:
            return False
        due, self.validation_due = self.validation_due, False
        return due


class WindowLoggerConnector(_LoggerConnector):
    """Logs once per window in manual optimization too, where Lightning's version logs for every batch.

    With what the module logs go the strategy's metrics of the update; nothing of theirs is read before.
    """

    @property
    @override
    def metrics(self) -> _METRICS:
        """In training steps also the strategy's, except for names that the module or a callback logs itself."""
        metrics = super().metrics
        if self.trainer.training and self._first_loop_iter is not None:
            assert self.trainer._results is not None
            taken = {result.meta.name for result in self.trainer._results.values()}
            own = {name: v for name, v in _strategy(self.trainer).logged_metrics.items() if name not in taken}
            metrics["log"].update(own)
            metrics["callback"].update(own)
        return metrics

    @override
    def update_train_step_metrics(self) -> None:
        if not self.trainer.fit_loop._should_accumulate():
            super().update_train_step_metrics()
