"""The engine that a caller drives: requests, windows, and steps with a divisor."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any

import torch
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION
from deepspeed.runtime.zero.utils import get_norm_dtype
from typing_extensions import override

from requestzero.config.normalization import check_normalization
from requestzero.config.validation import check_weight
from requestzero.zero import overflow_policy as policy
from requestzero.zero.announcing_engine import AnnouncingEngine
from requestzero.zero.patch import replaced
from requestzero.zero.rank_check import join
from requestzero.zero.rank_dependent import RankDependentOptimizer
from requestzero.zero.skips import SkipRecord
from requestzero.zero.zero_optimizer import RequestZeROOptimizer

_SKIPS_IN_CHECKPOINT = "requestzero_skips"


class RequestZeROEngine(AnnouncingEngine):
    """``DeepSpeedEngine`` for update windows of several requests; built by :func:`requestzero.initialize`.

    Written for DeepSpeed 0.19.8. All ranks run the same number of backwards over the same parameters; where they do
    not, and unless ``rank_agreement`` is off, all of them raise
    :class:`~requestzero.errors.RankDisagreementError`, after which the engine refuses to go on.
    """

    # --- windows ----------------------------------------------------------------------------------------------------

    def end_request(self) -> None:
        """End the open request after its last backward has already run.

        For callers who learn only afterwards that it was the last; those who know call
        ``set_gradient_accumulation_boundary(True)`` before it. Does not step. Changes nothing when no backward has run
        since the last request end. To be called on all ranks; collective at stage 1, which reduces here.

        Raises:
            RuntimeError: inside ``no_sync()`` or ``coalesce_grad_reduction()``.
        """
        self.agreement.check()
        if self.inside_no_sync_ctxt:
            raise RuntimeError("end_request() inside no_sync() or coalesce_grad_reduction(): call it after the block.")
        self.agreement.end_request()
        if not self.update_window.request_open:
            return
        if self.zero_optimization_partition_gradients():
            self.optimizer.finalize_gradient_accumulation_boundary()
        else:
            saved, self._is_gradient_accumulation_boundary = self._is_gradient_accumulation_boundary, True
            try:
                self.allreduce_gradients()
            finally:
                self._is_gradient_accumulation_boundary = saved
        self.optimizer.set_gradient_accumulation_boundary(self.is_gradient_accumulation_boundary())
        self._judge_request()

    def _judge_request(self) -> None:
        """Once after every request end: what the overflow policy wants done there; by default nothing."""
        window = self.update_window
        if window.judged == window.requests:
            return
        window.judged = window.requests
        if self.options.overflow.on_overflow == "raise":
            self.optimizer.note_request_end()
        elif self.options.overflow.on_overflow == "drop_request":
            self.agreement.before_finite_check()
            dropped = self.optimizer.judge_request()
            if dropped is not None:
                self._skips.dropped_requests += 1
                policy.tell_dropped(dropped, self.attempted_updates + 1)

    @override
    def zero_grad(self) -> None:
        """Discard the open window, at every stage."""
        super().zero_grad()
        self.optimizer.zero_grad()
        self._unmanaged_backward_count = 0

    @override
    def backward(
        self, loss: torch.Tensor, *args: Any, weight: float | torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """As DeepSpeed's, and report the micro-batch's weight, for ``step(normalization="token")``.

        Args:
            loss: a scalar; with ``"token"`` the sum over what ``weight`` counts, and not its mean.
            weight: see :meth:`add_weight`, which is for those who call ``loss.backward()``.
            *args: as ``kwargs``, for DeepSpeed's ``backward``.

        Raises:
            ValueError: see :meth:`add_weight`.
        """
        if weight is not None:
            self.add_weight(weight)  # before the backward, at whose end its request may be judged and dropped
        return super().backward(loss, *args, **kwargs)

    def add_weight(self, weight: float | torch.Tensor) -> None:
        """Report the weight of one micro-batch, right before its backward (this rank only).

        Args:
            weight: a finite number of at least 0, such as the number of trainable tokens, or a tensor that holds one.
                A tensor is not read before the step, so it may come from the device without anybody waiting for it.

        Raises:
            ValueError: not such a number. A tensor's value is judged in ``step``.
        """
        check_weight(weight)
        if isinstance(weight, torch.Tensor):
            weight = weight.detach().reshape(()).to(self.device, get_norm_dtype(), non_blocking=True)
        self.update_window.add_weight(weight)

    @override
    def step(
        self,
        lr_kwargs: dict[str, Any] | None = None,
        *,
        divisor: float | None = None,
        normalization: str | None = None,
    ) -> None:
        """Apply the window's gradient sum, divided, at a boundary (collective).

        A request that is still open ends here. ``get_global_grad_norm()`` and gradient clipping refer to the divided
        gradient. Without a backward since the last step nothing is applied and no counter moves. Nor does any but
        :attr:`empty_updates` where the window's total weight is zero; its gradients are discarded then.

        Args:
            lr_kwargs: passed to the learning rate scheduler, as in DeepSpeed.
            divisor: a positive finite number, the same on all ranks; DeepSpeed takes the mean over ranks. 1 unless
                given.
            normalization: ``"mean"`` divides by the window's micro-batches per rank, and ``"sum"`` by nothing, after
                DeepSpeed's mean over ranks; ``"token"`` divides the sum over ranks by the weight of all micro-batches
                of all ranks, which ``backward`` was given or :meth:`add_weight` reported.

        Raises:
            ValueError: a divisor or normalization that is not allowed, both of them, or a normalization although
                DeepSpeed divides by its ``gradient_accumulation_steps``.
            RankDisagreementError: another rank does not step here.
            RuntimeError: on all ranks, if they give different divisors (seen where ``step`` reads the norm: not with
                ``compute_grad_norm: false``, nor with the overflow check and clipping off); or a divisor is given while
                a request is open that may yet be dropped. With ``"token"`` if a micro-batch has no weight or more than
                one, or a weight is negative, infinite or NaN.
            GradientOverflowError: on all ranks, if the gradient is not finite and ``overflow`` says that the run ends.
        """
        check_normalization(normalization, divisor, self.gradient_accumulation_steps())
        if divisor is not None:
            self._check_divisor(divisor)
        at_boundary = not self.managed_gradient_accumulation() or self.is_gradient_accumulation_boundary()
        if at_boundary and not self.inside_no_sync_ctxt:
            if not self.update_window.is_open:
                self.optimizer.discard_window()  # an interrupted backward may have left something behind
                self._step_applied = False
                return
            self.agree_to_step()
            self.end_request()
            window, scale = self.update_window, self.current_loss_scale()
            if not self._choose_divisor(divisor, normalization):
                self._skip_empty_window()
                return
            try:
                super().step(lr_kwargs)
            finally:
                self._running_engine_step = False  # a step that raised is over: without it backwards would end requests
            self._see_to_overflow(window, scale)
        else:
            super().step(lr_kwargs)

    def _check_divisor(self, divisor: float) -> None:
        number = isinstance(divisor, Real) and not isinstance(divisor, bool)
        fp32 = torch.finfo(torch.float32)
        window = self.update_window
        nothing_left = bool(window.dropped) and not window.has_sum
        if not (number and fp32.tiny <= divisor <= fp32.max) and not (number and nothing_left):
            raise ValueError(
                f"divisor={divisor!r} is not allowed: use a positive finite number in fp32's range, "
                "the same on all ranks."
            )
        if window.request_open and divisor != 1 and self.options.overflow.on_overflow == "drop_request":
            raise RuntimeError(
                f"step(divisor={divisor!r}) with an open request, which may yet be dropped, and its micro-batches with "
                "it: call engine.end_request() first, then take the divisor from engine.update_window."
            )

    def _choose_divisor(self, divisor: float | None, normalization: str | None) -> bool:
        """Settle what the open window is divided by; false if that is zero. Collective with ``"token"``."""
        window = self.update_window
        if normalization == "token" and window.has_sum:
            return self.optimizer.weigh_window()
        window.by_weight = False
        window.divisor = float(window.micro_batches if normalization == "mean" else divisor or 1.0)
        return True

    def _skip_empty_window(self) -> None:
        """Discard a window of zero total weight. All ranks are here, since they have read the same total."""
        if self._skips.empty == 0 and self.global_rank == 0:
            warnings.warn(
                f"An update window of {self.update_window.micro_batches} micro-batches per rank has a total weight of "
                "zero over all ranks: there is nothing to divide by, so it is skipped. Further ones are only counted, "
                "in engine.empty_updates.",
                stacklevel=3,
            )
        self._skips.empty += 1
        self.zero_grad()
        self._step_applied = False
        self._global_grad_norm = self.optimizer._global_grad_norm = torch.zeros((), device=self.device)

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Also begin to restore a released gradient partition at its end (stage 2, CPU offload).

        Not before: what the forward needs for itself, such as logits, would meet the partition.
        """
        outputs = super().forward(*inputs, **kwargs)
        if torch.is_grad_enabled() and self.zero_optimization_partition_gradients():
            self._restore_partitions()
        return outputs

    def _restore_partitions(self) -> None:
        """What a released partition held comes back, unless nothing is reduced into it for now."""
        if not self.inside_no_sync_ctxt:
            self.optimizer.restore_ahead()

    @override
    def _backward_prologue(self) -> None:
        """Also start the count of gradient hooks anew, as a forward does: there may have been two before this.

        And restore a released gradient partition where the forward has not: stage 1 reduces at a request's end only, so
        that the partition would be in the way before.
        """
        last = self.is_gradient_accumulation_boundary()
        if last or self.zero_optimization_partition_gradients():
            self._restore_partitions()
        if self.optimizer._backward_active_depth == 0:
            self.optimizer.clear_backward_seen_flag()
            self.agreement.begin_backward(last=last)
        super()._backward_prologue()

    @override
    def _backward_epilogue(self) -> None:
        """Also count the micro-batch: this runs once per backward, whichever way it was started."""
        self.update_window.begin_micro_batch()
        super()._backward_epilogue()
        self.agreement.end_micro_batch(not self.update_window.request_open)
        self._judge_request()

    @override
    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Also see to the end of the request, which is that of the block."""
        with super().coalesce_grad_reduction():
            yield
        self.agreement.end_request()
        self._judge_request()

    @override
    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Only where something has come since the last request end: a step asks again after :meth:`end_request`."""
        if self.update_window.request_open:
            super().allreduce_gradients(*args, **kwargs)

    @override
    def is_gradient_accumulation_boundary(self) -> bool:
        """Inside ``no_sync()`` no backward is one: its gradients stay local until a later backward reduces them."""
        return not self.inside_no_sync_ctxt and bool(super().is_gradient_accumulation_boundary())

    # --- construction -----------------------------------------------------------------------------------------------

    @override
    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> Any:
        """Stage 1 in bf16 with fp32 accumulation gets the ZeRO class as well, instead of ``BF16_Optimizer``."""
        wrapper = super()._do_optimizer_sanity_check(basic_optimizer)
        return ZERO_OPTIMIZATION if wrapper == BFLOAT16 else wrapper

    @override
    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer | None) -> Any:
        wanted = partial(
            RankDependentOptimizer if self.options.rank_dependent_parameters else RequestZeROOptimizer,
            retain_gpu_grad_partition_until_step=self.options.retain_gpu_grad_partition_until_step,
            records_origin=self.options.overflow.on_overflow == "raise",
            drops_requests=self.options.overflow.on_overflow == "drop_request",
        )
        with replaced(deepspeed_engine, "DeepSpeedZeroOptimizer", wanted):
            built = super()._configure_zero_optimizer(optimizer)
        if self.options.overflow.check_grad_overflow is not None and not self.bfloat16_enabled():
            built.check_grad_overflow = self.options.overflow.check_grad_overflow or self.fp16_enabled()
        if self.options.rank_agreement:
            join(built)
        return built

    @property
    def communication_data_type(self) -> torch.dtype:
        """dtype of gradient reduction: the user's, else fp32 where stage 1 accumulates in fp32, else the model's.

        Stage 1 reduces once per request, so that fp32 costs little and saves the sum from being rounded to 16 bits;
        stage 2 reduces in every backward, where it would double the traffic.
        """
        chosen = self._config.communication_data_type
        _, grad_accum_dtype = self.get_data_types()
        if chosen is None and self.zero_optimization_stage() == 1 and grad_accum_dtype == torch.float32:
            return torch.float32
        return super().communication_data_type

    @communication_data_type.setter
    def communication_data_type(self, value: torch.dtype) -> None:
        self._config.communication_data_type = value

    @override
    def destroy(self) -> None:
        """Also leave the agreement of ranks."""
        # At the interpreter's end the store may be gone, and would be waited for.
        if isinstance(getattr(self, "optimizer", None), RequestZeROOptimizer) and not sys.is_finalizing():
            self.agreement.close()
        super().destroy()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As DeepSpeed's (collective), with the counters that it does not have among the client's state.

        Raises:
            RuntimeError: the window is open; its gradients would be missing from the checkpoint.
            RankDisagreementError: another rank does something else, or the ranks have disagreed before.
        """
        self.agreement.before_checkpoint("saves")
        if self.update_window.is_open:
            raise RuntimeError(
                f"save_checkpoint() with an open update window ({self.update_window.micro_batches} micro-batches "
                "since the last step): their gradients would be lost on resume. Save after step(), or call zero_grad() "
                "to discard them."
            )
        state = {**(client_state or {}), _SKIPS_IN_CHECKPOINT: self._skips.state_dict()}
        return super().save_checkpoint(save_dir, tag, state, *args, **kwargs)

    @override
    def load_checkpoint(self, load_dir: str, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's (collective); the open window is discarded, unless there is no checkpoint to load.

        Raises:
            RankDisagreementError: another rank does something else, or the ranks have disagreed before.
        """
        self.agreement.before_checkpoint("loads")
        loaded = super().load_checkpoint(load_dir, *args, **kwargs)
        path, client_state = loaded
        if path is not None:
            self.zero_grad()
            record = client_state.pop(_SKIPS_IN_CHECKPOINT, {})
            # DeepSpeed gives its counters to the client where only the module was loaded.
            if "skipped_steps" not in client_state:
                self._skips = SkipRecord.from_state(record)
        return loaded
