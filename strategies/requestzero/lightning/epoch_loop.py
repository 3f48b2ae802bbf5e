"""The loop over an epoch's batches, which goes by update windows here.

Written for Lightning 2.6.6.
"""

from __future__ import annotations

import torch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from requestzero.lightning.window_driver import driver_of


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
        if self.trainer.world_size > 1:
            self._broadcast_sigterm_tensor()  # a signal may have come in the last batch

    @override
    def _broadcast_sigterm_tensor(self) -> None:
        """Tell each other of signals, in a wait that ends where the ranks are in different collectives.

        Lightning's version, which comes before every batch, waits without end and swallows errors; it runs where a
        rank has received SIGTERM. SLURM's signal to requeue is served here too, as rank 0 has it.
        """
        driver = driver_of(self.trainer)
        engine = driver.engine
        if engine is None:
            super()._broadcast_sigterm_tensor()
            return
        device = self.trainer.strategy.root_device
        sigterm = self.trainer.received_sigterm or (driver.sigterm is not None and driver.sigterm.pending)
        sigterm = sigterm and not driver.inside_request  # at its end what is pending can be saved
        requeue = driver.requeue_is_due and self.trainer.is_global_zero
        received = torch.tensor([int(sigterm), int(requeue)], device=device)
        work = torch.distributed.all_reduce(received, op=torch.distributed.ReduceOp.MAX, async_op=True)
        engine.agreement.wait_for_batch(work, device)
        any_sigterm, any_requeue = received.tolist()
        if any_requeue:
            driver.serve_requeue()
        if any_sigterm:
            if driver.sigterm is not None:
                driver.sigterm.serve()
            super()._broadcast_sigterm_tensor()

    @override
    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Also forget a validation that an earlier epoch has left undone, and warn of a loader that cannot resume."""
        super().on_run_start(data_fetcher)
        self.validation_due = self.validation_due and driver_of(self.trainer).is_open  # a window was loaded
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
        self._end_batch()

    def _end_batch(self) -> None:
        """Serve a requeue that has waited for the request's end; among several ranks that is up to rank 0."""
        driver = driver_of(self.trainer)
        driver.in_batch = False
        if driver.requeue_is_due and self.trainer.world_size == 1:
            driver.serve_requeue()

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
        if self.restarting and not driver_of(self.trainer).is_open:
            return due
        self.validation_due = self.validation_due or due
        if driver_of(self.trainer).is_open:
            return False
        due, self.validation_due = self.validation_due, False
        return due
