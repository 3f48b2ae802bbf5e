"""The running update window: Lightning's batches, steps and epochs, told to the engine.

Written for Lightning 2.6.6.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig

from requestzero.config.options import RequestZeROSettings
from requestzero.config.validation import check_weight
from requestzero.data.boundaries import WindowMarks, unwrap
from requestzero.data.micro_batch import MicroBatch
from requestzero.errors import AbortRequest
from requestzero.lightning.checks import check_scheduler_frequency
from requestzero.lightning.current_batch import CurrentBatch
from requestzero.lightning.requeue import DeferredRequeue
from requestzero.lightning.sigterm import NotedSigterm
from requestzero.lightning.user_hooks import STAGE_3_GRADIENTS, reads_gradients
from requestzero.zero.clipping import LoopClipping, check_norm_is_computed
from requestzero.zero.metrics import logged_metrics

if TYPE_CHECKING:
    from requestzero.zero.engine import RequestZeROEngine


class WindowOwner(Protocol):
    """The part of a strategy that its :class:`WindowDriver` reads."""

    settings: RequestZeROSettings
    lr_scheduler_configs: list[LRSchedulerConfig]

    @property
    def engine(self) -> RequestZeROEngine | None:
        """The request-safe engine, ``None`` outside of fits."""

    @property
    def lightning_module(self) -> pl.LightningModule | None:
        """The module that trains, ``None`` before the Trainer runs."""


class WindowLoop(Protocol):
    """The part of the loop over an epoch's batches that belongs to the window."""

    validation_due: bool


class HasWindowDriver(Protocol):
    """The part of a strategy that loops and loggers use."""

    window_driver: WindowDriver


def driver_of(trainer: pl.Trainer) -> WindowDriver:
    """Return the driver of the Trainer's strategy, which is a ``RequestZeRO``."""
    return cast(HasWindowDriver, trainer.strategy).window_driver


class WindowDriver:
    """Tells the engine of requests, weights, steps and the end of the data, and keeps what is known of the window.

    The strategy owns it; Lightning's loops and the precision plugin call it.

    Args:
        owner: the strategy, which may still be under construction: it is read when a method runs.
    """

    def __init__(self, owner: WindowOwner) -> None:
        self._owner = owner
        self._told_division = False
        self.begin_fit()
        self.has_trained = False
        """True once a fit has begun."""

    def begin_fit(self) -> None:
        """Forget an earlier fit."""
        self.has_trained = True
        self.marks = WindowMarks(option="accumulate_grad_batches", owner="Trainer")
        self.batch = CurrentBatch(update_applied=None)
        self.logged_metrics: dict[str, torch.Tensor] = {}
        self._data_ended = False  # and the other ranks know
        self._failed = False
        self.request_aborted = False
        """True until the next request begins, where the current one was aborted."""
        self.in_batch = False
        """True from a training batch's first hook to its last."""
        self.requeue: DeferredRequeue | None = None
        """SLURM's requeue, in a fit."""
        self.sigterm: NotedSigterm | None = None
        """The signal to end, in a fit of several ranks."""

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> RequestZeROEngine | None:
        """The strategy's engine."""
        return self._owner.engine

    @property
    def _running(self) -> RequestZeROEngine:
        engine = self._owner.engine
        assert engine is not None
        return engine

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self._owner.settings.stage

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer that the strategy's module is attached to."""
        assert self._owner.lightning_module is not None
        return self._owner.lightning_module.trainer

    @property
    def is_open(self) -> bool:
        """True while gradients are pending: a backward has run since the last step or discard."""
        return self.engine is not None and self.engine.has_pending_gradients

    @property
    def inside_request(self) -> bool:
        """True while a request is open: nothing can be saved before its end."""
        return self.engine is not None and self.engine.inside_request

    @property
    def is_complete(self) -> bool:
        """True if a window ends with the current batch (automatic), or nothing is pending (manual)."""
        return self.marks.window_end if self._automatic else not (self.is_open or self.batch.discarded)

    @property
    def _automatic(self) -> bool:
        module = self._owner.lightning_module
        return module is None or module.automatic_optimization

    @property
    def holds_schedulers(self) -> bool:
        """True if the current batch has made no update, so that schedulers have to wait.

        False before a fit's first batch: a resumed run makes up for what came after its checkpoint was saved.
        """
        return self.batch.update_applied is False

    @property
    def steps_incomplete_windows(self) -> bool:
        """True if an epoch's last batch ends the open window with a step."""
        return self._automatic and self._owner.settings.incomplete_window == "step"

    # --- a batch ----------------------------------------------------------------------------------------------------

    def begin_batch(self, batch: Any) -> Any:
        """Return a fetched batch as the model gets it. In training, also note its marks and announce its request.

        Raises:
            ValueError: the loader's marks contradict each other or the Trainer.
        """
        trainer = self.trainer
        if not trainer.training:
            return unwrap(batch)
        self.batch, self._data_ended, self.in_batch = CurrentBatch(), False, True
        if batch is None:
            self.marks.skip()
            return None
        if isinstance(batch, MicroBatch):
            check_scheduler_frequency(self._owner.lr_scheduler_configs)
        inputs = self.marks.take(batch, trainer.accumulate_grad_batches)
        self.batch.weight = self.marks.weight
        self._announce()
        return inputs

    def _announce(self) -> None:
        """Tell the engine of a request at its first batch, so that ranks agree while the forward runs."""
        if self.marks.starts_request and not self._running.update_window.request_open:
            self.request_aborted = False
            micro_batches = self.marks.micro_batches if self._automatic else None
            window_end = self.marks.window_ends_with_request if self._automatic else None
            self._running.begin_request(self.marks.request_id, micro_batches=micro_batches, window_end=window_end)

    def add_weight(self, weight: float | torch.Tensor) -> None:
        """Report the weight of one backward; see :meth:`RequestZeRO.add_weight`.

        Raises:
            ValueError: no number that can be a weight, or the batch has one already (automatic optimization).
        """
        check_weight(weight)
        if self._automatic:
            self.batch.add_weight(weight)
        else:
            self._running.add_weight(weight)

    def before_backward(self) -> None:
        """Tell the engine whether the next backward is its request's last, and the weight of its micro-batch.

        In manual optimization the former is known only when ``training_step`` has returned, and the latter is what the
        user has reported.

        Raises:
            ValueError: ``normalization="token"``, and the batch has no weight.
            RuntimeError: the window's gradient was clipped already.
        """
        if self._running.next_step_clipping.asked(self._running.update_window) is not None:
            raise RuntimeError(
                "A backward after self.clip_gradients(...) or torch.nn.utils.clip_grad_norm_(...) would add a gradient "
                "that is not clipped: call it right before opt.step()."
            )
        weight = None
        if self._automatic and self._owner.settings.normalization == "token":
            weight = self.batch.pop_weight(self.marks.request_id)
        self._running.set_gradient_accumulation_boundary(self._automatic and self.marks.request_end)
        if self._automatic and self.marks.window_end:
            self._running.update_window.ends_with_request = True
        if weight is not None:
            self._running.add_weight(weight)

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Abort the current request for an ``AbortRequest`` that leaves the block. Collective then.

        Raises:
            RuntimeError: the request cannot be aborted.
        """
        try:
            yield
        except AbortRequest as error:
            self._running.abort_request(str(error))
            self.request_aborted = True

    def end_batch(self, is_last: bool) -> None:
        """End a manual request, and drop an epoch's last window where the settings say so. Collective.

        To be called once the batch's backwards, and the step where it had one, are done.

        Args:
            is_last: whether the batch is the last of its epoch.
        """
        if not self._automatic and self.marks.request_end:
            self.end_request()
        if is_last and self._automatic and self._owner.settings.incomplete_window == "drop" and self.is_open:
            rank_zero_info(f"RequestZeRO drops the epoch's last window of {self.describe_window()}.")
            self._running.zero_grad()

    @property
    def requeue_is_due(self) -> bool:
        """True if SLURM's signal has come to this rank and can be served."""
        return self.requeue is not None and self.requeue.pending and not self.inside_request

    def serve_requeue(self) -> None:
        """Save and requeue for SLURM. Collective."""
        if self.requeue is not None:
            self.requeue.serve()

    def end_request(self) -> None:
        """End the open request, if there is one. Collective."""
        if self.engine is not None:
            self.engine.end_request()

    # --- a window ---------------------------------------------------------------------------------------------------

    def step(self, **kwargs: Any) -> None:
        """Apply the window's sum, divided as ``normalization`` says; nothing without gradients. Collective.

        Args:
            **kwargs: for the engine's ``step``.
        """
        engine, settings = self._running, self._owner.settings
        if self._automatic and not self.marks.request_end:
            rank_zero_warn(
                f"The epoch ended inside request {self.marks.request_id!r}: its micro-batches so far go into "
                "the update."
            )
        window = engine.update_window
        engine.end_request()
        if not self._automatic and settings.normalization == "mean" and window.micro_batches > 1:
            self._tell_division(window.micro_batches)
        engine.set_gradient_accumulation_boundary(True)
        attempted = engine.attempted_updates
        engine.step(normalization=settings.normalization, **kwargs)
        self.batch.update_applied = engine.was_step_applied()
        if settings.log_metrics and engine.attempted_updates > attempted:
            self.logged_metrics = {name: torch.as_tensor(value) for name, value in logged_metrics(engine).items()}

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """See ``RequestZeRO.gradients``.

        Raises:
            RuntimeError: at stage 3.
        """
        if self.stage == 3:
            raise RuntimeError(f"strategy.gradients() is not possible at stage 3: {STAGE_3_GRADIENTS}")
        from requestzero.zero.full_gradients import full_gradients  # imports DeepSpeed

        with full_gradients(self._running, normalization=self._owner.settings.normalization):
            yield

    def gradients_in_hooks(self) -> AbstractContextManager[None]:
        """Return a block for the hooks before a step: :meth:`gradients`, if one is the user's; none at stage 3."""
        wanted = self._owner.settings.gradients_in_hooks and self.stage < 3 and reads_gradients(self.trainer)
        return self.gradients() if wanted else nullcontext()

    def clip(self, max_norm: float) -> None:
        """Clip the divided gradient in the next step, unless the config's ``gradient_clipping`` is smaller.

        Raises:
            ValueError: steps compute no norm.
        """
        check_norm_is_computed(self._running, "self.clip_gradients")
        self._running.next_step_clipping.ask(self._running.update_window, max_norm)

    def serve_torch_clipping(self) -> None:
        """Let PyTorch's own functions clip too, in the engine of a fit."""
        self._running.loop_clipping = LoopClipping(self._running, self._prepare_step, configured=None)

    def _prepare_step(self, call: str) -> dict[str, str]:
        if self._automatic and not self.marks.request_end:
            raise RuntimeError(
                f"{call} inside the request {self.marks.request_id!r}, which has more micro-batches: clip in "
                "on_before_optimizer_step, or with Trainer(gradient_clip_val=...)."
            )
        self._running.end_request()
        return {"normalization": self._owner.settings.normalization}

    def _tell_division(self, divisor: int) -> None:
        if not self._told_division:
            rank_zero_info(
                f"RequestZeRO divides this window's sum by its {divisor} micro-batches "
                "(normalization='mean'): do not divide the loss in training_step too, or use "
                "normalization='sum'."
            )
        self._told_division = True

    def discard_window(self, reason: str) -> None:
        """Discard the open window, if there is one, and warn."""
        if self.is_open:
            rank_zero_warn(f"RequestZeRO discards an open update window of {self.describe_window()}: {reason}.")
            self._running.zero_grad()
            self.batch.discarded = True

    def place_in_window(self) -> dict[str, Any]:
        """Return the loop's place in the open window, for a checkpoint."""
        loop = cast(WindowLoop, self.trainer.fit_loop.epoch_loop)
        return {"requests": self.marks.requests, "validation_due": loop.validation_due}

    def resume_window(self, place: dict[str, Any]) -> None:
        """Go on inside the window that the engine has loaded, unless the step could not divide it."""
        if self._running.update_window.shared_out and self._owner.settings.normalization == "mean":
            self.discard_window(
                "another number of ranks has begun it, so that there is no mean over the micro-batches of a rank "
                "(normalization='token' and 'sum' go on in it)"
            )
            return
        self.marks.resume(place["requests"])
        cast(WindowLoop, self.trainer.fit_loop.epoch_loop).validation_due = place["validation_due"]

    def describe_window(self) -> str:
        """Return the counts of the open window as text that is different for every window."""
        window, trainer = self._running.update_window, self.trainer
        # Python shows the same warning once only: epoch and update make it unique.
        return (
            f"{window.micro_batches} micro-batches, {window.requests} ended requests (epoch "
            f"{trainer.current_epoch}, after update {trainer.global_step})"
        )

    # --- an epoch ---------------------------------------------------------------------------------------------------

    def end_data(self) -> None:
        """Tell the other ranks that this one has no more batches in the epoch; once in each. Collective.

        Raises:
            RankDisagreementError: another rank has more.
        """
        if self.engine is not None and not self._data_ended:
            self._data_ended = True
            self.engine.end_data()

    def end_epoch(self) -> None:
        """Discard a window that the epoch has left open, with a warning. Collective."""
        self.end_data()
        self._data_ended = False
        self.discard_window("the epoch was left inside it")
        self.marks.end_epoch()

    def before_collective(self, name: str) -> None:
        """Agree to a collective of Lightning's in a fit. Collective."""
        module = self._owner.lightning_module
        fitting = module is not None and module._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        if fitting and self.engine is not None and not self._failed:
            self.engine.agreement.before_collective(name)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an exception that ends the fit on this rank; once in each fit.

        Raises:
            RankDisagreementError: unless all ranks have failed alike.
        """
        if self.engine is not None and not self._failed:
            self._failed = True
            self.engine.fail(error)
