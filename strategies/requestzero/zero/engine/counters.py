"""The read-outs of an engine: windows, updates, skips, bytes."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from requestzero.config.engine_options import EngineOptions
from requestzero.rank_check.interface import Agreement
from requestzero.zero.common.next_step_clipping import NextStepClipping
from requestzero.zero.common.partition_traffic import PartitionTraffic
from requestzero.zero.common.window import UpdateWindow
from requestzero.zero.engine.applied_requests import AppliedRequests
from requestzero.zero.engine.deprecated_calls import ReadoutFloat, ReadoutInt
from requestzero.zero.engine.set_gradients import SetGradients
from requestzero.zero.overflow import skip_messages
from requestzero.zero.overflow.skips import SkippedUpdate, SkipRecord
from requestzero.zero.stage_1_and_2.optimizer import RequestZeROOptimizer
from requestzero.zero.stage_3.forward_order import ForwardOrder
from requestzero.zero.stage_3.optimizer import RequestZeROStage3Optimizer


class CountingEngine(DeepSpeedEngine):
    """DeepSpeed's engine with a request-safe optimizer, and the record of its updates."""

    optimizer: RequestZeROOptimizer | RequestZeROStage3Optimizer
    _is_gradient_accumulation_boundary: bool | None

    def __init__(self, *args: Any, options: EngineOptions | None = None, **kwargs: Any) -> None:
        self.options = EngineOptions() if options is None else options
        self._skips = SkipRecord()
        self._applied = AppliedRequests()
        self.next_step_clipping = NextStepClipping()
        self.set_gradients = SetGradients()
        self.forward_order = ForwardOrder()
        super().__init__(*args, **kwargs)

    @property
    def agreement(self) -> Agreement:
        """The agreement of the data-parallel ranks; inactive where there is one rank, or ``rank_agreement`` is off."""
        return self.optimizer.ranks.agreement

    @property
    def update_window(self) -> UpdateWindow:
        """The open window's counts; a new object after every step and ``zero_grad()``."""
        return self.optimizer.window

    @property
    def has_pending_gradients(self) -> bool:
        """True if the next step has something to apply or to skip, backwards that the engine has not seen included."""
        return self.update_window.is_open or self.optimizer.has_unseen_gradients

    @property
    def applied_updates(self) -> int:
        """Updates that changed the weights: attempted ones less skipped ones."""
        return self.attempted_updates - self.skipped_updates

    @property
    def attempted_updates(self) -> int:
        """Windows that were stepped, applied or not (DeepSpeed's ``global_steps``)."""
        return int(self.global_steps)

    @property
    def skipped_updates(self) -> int:
        """Updates that were not applied because their gradient was not finite (DeepSpeed's ``skipped_steps``)."""
        return int(self.skipped_steps)

    @property
    def empty_updates(self) -> int:
        """Windows that were left out because their total weight was zero; ``attempted_updates`` does not count them."""
        return self._skips.empty

    @property
    def consecutive_skips(self) -> int:
        """Updates that were skipped since the last one that was applied."""
        return self._skips.consecutive

    @property
    def dropped_requests(self) -> int:
        """Requests that were left out of their window's update (``overflow.on_overflow="drop_request"``)."""
        return self._skips.dropped_requests

    @property
    def aborted_requests(self) -> int:
        """Requests that were aborted, see ``abort_request``."""
        return self._skips.aborted_requests

    @property
    def last_skip(self) -> SkippedUpdate | None:
        """The update that was skipped last; ``None`` before the first."""
        return self._skips.recent[-1] if self._skips.recent else None

    @property
    def loss_scale_history(self) -> tuple[tuple[int, float], ...]:
        """The last 100 changes of the loss scale: updates attempted until then, and the scale from then on.

        The first entry is the scale that the first update began with; empty before any step.
        """
        return tuple(self._skips.loss_scales)

    @property
    def current_loss_scale(self) -> ReadoutFloat:
        """The factor that losses are multiplied by now; 1 outside fp16."""
        return ReadoutFloat(self.optimizer.loss_scale)

    @property
    def request_backup_bytes(self) -> int:
        """Bytes of this rank's copy of the window's sums (``abort``, ``overflow.on_overflow="drop_request"``)."""
        return self.optimizer.rollback.backup_bytes

    @property
    def grad_partition_bytes(self) -> ReadoutInt:
        """Bytes of the gradient partition that this rank holds on the accelerator now (0 when released)."""
        return ReadoutInt(self.optimizer.sums.device_bytes)

    @property
    def peak_grad_partition_bytes(self) -> int:
        """The most that :attr:`grad_partition_bytes` has been at the end of a backward."""
        return self.optimizer.sums.peak_device_bytes

    @property
    def local_gradient_bytes(self) -> int:
        """Bytes of the gradients that this rank keeps until they are reduced (``reduce_gradients_at``)."""
        return self.optimizer.local.nbytes if isinstance(self.optimizer, RequestZeROOptimizer) else 0

    @property
    def peak_local_gradient_bytes(self) -> int:
        """The most that :attr:`local_gradient_bytes` has been."""
        return self.optimizer.local.peak_nbytes if isinstance(self.optimizer, RequestZeROOptimizer) else 0

    @property
    def partition_traffic(self) -> PartitionTraffic:
        """Copies between this rank's gradient partitions and its host gradients since the engine was built."""
        return self.optimizer.sums.traffic

    def _record_update(self, window: UpdateWindow, scale: float) -> None:
        """After an attempted update: count it, log a skip, and end the run where ``overflow`` says so (collective).

        Args:
            window: the one that was stepped.
            scale: the loss scale of its backwards.
        """
        record, limit = self._skips, self.options.overflow.max_consecutive_skips
        record.note_scale(self.attempted_updates - 1, scale)
        if self.was_step_applied():
            self._applied.note(window.request_ids[: window.requests])
            record.consecutive = 0
            record.note_scale(self.attempted_updates, float(self.optimizer.loss_scale))
            return
        cause = self.optimizer.norm.cause
        assert cause is not None  # an update is skipped after a look at the norm only
        skip = SkippedUpdate(
            update=self.attempted_updates,
            cause=cause,
            request_ids=tuple(window.request_ids) or tuple(each.request_id for each in window.dropped),
            loss_scale_before=scale,
            loss_scale_after=float(self.optimizer.loss_scale),
        )
        record.note_skip(skip)
        record.note_scale(self.attempted_updates, skip.loss_scale_after)
        if self.options.overflow.on_overflow == "raise":
            origin = "" if self.optimizer.origin is None else self.optimizer.origin.message
            skip_messages.raise_on_all_ranks(skip_messages.describe_overflow(skip, origin))
        skip_messages.log_skip(skip, record, self.skipped_updates)
        if self.optimizer.loss_scale_exhausted:
            skip_messages.raise_on_all_ranks(skip_messages.describe_scale_at_minimum(record))
        if limit is not None and record.consecutive >= limit:
            skip_messages.raise_on_all_ranks(skip_messages.describe_skips_in_a_row(record, limit))
