"""The engine that a caller drives: requests, windows, and steps with a divisor."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION
from deepspeed.runtime.zero.utils import get_norm_dtype
from typing_extensions import override

from requestzero.config.normalization import check_normalization
from requestzero.config.reduction_time import ReduceAt, ReductionTime, reduction_time
from requestzero.config.rules import UNEQUAL_MEANS
from requestzero.config.validation import check_weight
from requestzero.zero.common import life_cycle
from requestzero.zero.common.frozen_parameters import refuse_gradients
from requestzero.zero.common.window_options import WindowOptions
from requestzero.zero.engine import torch_clipping
from requestzero.zero.engine.aborts import AbortingEngine
from requestzero.zero.engine.announcements import ends_together
from requestzero.zero.engine.optimizer_classes import OPTIMIZER_CLASSES, optimizer_classes_in_place
from requestzero.zero.engine.outputs import are_searched
from requestzero.zero.engine.step_arguments import check_divisor
from requestzero.zero.overflow import skip_messages
from requestzero.zero.stage_3.gathers import watch_gathers


class RequestZeROEngine(AbortingEngine):
    """``DeepSpeedEngine`` for update windows of several requests; built by :func:`requestzero.initialize`.

    All ranks run the same number of backwards (any number with ``rank_dependent_micro_batches``) over the same
    parameters; where they do not, and unless ``rank_agreement`` is off, all of them raise
    :class:`~requestzero.errors.RankDisagreementError`, after which the engine refuses to go on.
    """

    _backward_task: int = -1
    """Autograd's number of the backward that has begun last."""
    loop_clipping: torch_clipping.Clipping | None = None
    """The loop's way to clip, which a front end sets: it knows by what the next step divides."""
    shows_gradients: bool = False
    """True while ``param.grad`` is the window's gradient, see ``full_gradients``."""
    _has_unsearched_outputs: bool = False
    """True once the model has returned something that DeepSpeed does not look into."""

    # --- windows ----------------------------------------------------------------------------------------------------

    @override
    def set_gradient_accumulation_boundary(self, is_boundary: bool, *, window_end: bool = False) -> None:
        """Say before a backward whether its request ends with it (this rank only; the same on all ranks).

        Args:
            is_boundary: the request ends.
            window_end: a step follows. Gradients that wait for it are then reduced with this backward, else in
                ``step``.
        """
        super().set_gradient_accumulation_boundary(is_boundary)
        if window_end:
            self.update_window.ends_with_request = True

    @override
    def end_request(self) -> None:
        """End the open request after its last backward has already run.

        For callers who learn only afterwards that it was the last; those who know call
        ``set_gradient_accumulation_boundary(True)`` before it. Does not step. Changes nothing when no backward has run
        since the last request end. To be called on all ranks; collective with ``reduce_gradients_at="request"``.

        Raises:
            RuntimeError: inside ``no_sync()`` or ``coalesce_grad_reduction()``.
        """
        self.agreement.check()
        if self.inside_no_sync_ctxt:
            raise RuntimeError("end_request() inside no_sync() or coalesce_grad_reduction(): call it after the block.")
        self._count_unseen_backwards()
        self.agreement.end_request()
        if not self.update_window.request_open:
            return
        if self.optimizer.schedule.in_every_backward:
            self.optimizer.finalize_gradient_accumulation_boundary()
        else:
            saved, self._is_gradient_accumulation_boundary = self._is_gradient_accumulation_boundary, True
            try:
                self.allreduce_gradients()
            finally:
                self._is_gradient_accumulation_boundary = saved
        self.optimizer.set_gradient_accumulation_boundary(self.is_gradient_accumulation_boundary())
        self._check_request()

    def skip_micro_batch(self, reason: str, request_end: bool = True) -> None:
        """Leave the next micro-batch out. To be called on all ranks (collective).

        Args:
            reason: for the other ranks, in their message.
            request_end: the request ends with this micro-batch.

        Raises:
            RankDisagreementError: another rank does run it.
        """
        self.agreement.skip_micro_batch(reason, request_end)
        if request_end:
            self.end_request()

    def _check_request(self) -> None:
        """Do what the overflow policy wants once after every request end; by default nothing."""
        window = self.update_window
        if window.checked == window.requests:
            return
        window.checked = window.requests
        if self.optimizer.origin is not None:
            self.optimizer.origin.end_request()
        elif self._drops_requests:
            self.agreement.before_finite_check()
            dropped = self.optimizer.check_request()
            if dropped is not None:
                self._skips.dropped_requests += 1
                skip_messages.log_dropped(dropped, self.attempted_updates + 1)
                return
        self.optimizer.rollback.end_request(window)
        if not self.options.abort:
            self.optimizer.rollback.lose()

    @property
    def _drops_requests(self) -> bool:
        return self.options.overflow.on_overflow == "drop_request"

    @override
    def zero_grad(self) -> None:  # type: ignore[override]  # as DeepSpeed's
        """Discard the open window, at every stage (this rank only; every rank has to, or their windows differ)."""
        super().zero_grad()
        self.optimizer.zero_grad()
        self._unmanaged_backward_count = 0

    @override
    def backward(
        self, loss: torch.Tensor, *args: Any, weight: float | torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Run the backward of one micro-batch. Collective where it reduces, as ``reduce_gradients_at`` says.

        Args:
            loss: a scalar; with ``normalization="token"`` the sum over what ``weight`` counts, and not its mean.
            weight: see :meth:`add_weight`, which is for those who call ``loss.backward()``.
            *args: for DeepSpeed's ``backward`` (``retain_graph``, ``scale_wrt_gas``).
            **kwargs: likewise.

        Returns:
            The loss divided by ``gradient_accumulation_steps``, as DeepSpeed does, also where that is 1 a tensor of its
            own; ``loss`` itself with ``scale_wrt_gas=False``.

        Raises:
            ValueError: see :meth:`add_weight`.
            RuntimeError: an exception has ended the backward before this one, and its gradients are partly reduced.
            RankDisagreementError: another rank does something else.
        """
        if not self._running_engine_backward:
            self._refuse_after_interruption()
        if weight is not None:
            self.add_weight(weight)  # before the backward, at whose end its request may be dropped
        by_one = self.gradient_accumulation_steps() == 1 and not args and "scale_wrt_gas" not in kwargs
        if by_one:
            kwargs["scale_wrt_gas"] = False  # a division, and its backward
        hook = loss.register_hook(lambda _: self._backward_prologue()) if self._is_to_be_noticed(loss) else None
        try:
            result = super().backward(loss, *args, **kwargs)
        finally:
            if hook is not None:
                hook.remove()
        return result.clone() if by_one else result

    def _is_to_be_noticed(self, loss: torch.Tensor) -> bool:
        """Return whether a backward is noticed at its loss: DeepSpeed may not find the outputs at which it looks.

        With ``abort`` also where it has none yet, as in a backward within the forward: the ranks vote before each.
        """
        searches = self._has_unsearched_outputs or self.options.abort
        return searches and torch.is_tensor(loss) and loss.requires_grad

    def _refuse_after_interruption(self) -> None:
        """Refuse a backward, or a window's end, that would include a part of another backward, which nothing counts.

        To be called where no backward runs, so that one which has not ended was interrupted.
        """
        if self.optimizer._backward_active_depth > 0 and self._has_part_of_backward():
            raise RuntimeError(
                "An exception has ended the backward before this one; what it has brought is in the window's sum, or "
                "a part of its gradients is reduced already: call zero_grad(), which discards the update window, "
                "before the next backward or step."
            )
        if self.optimizer._backward_active_depth > 0:
            life_cycle.forget_backward(self.optimizer)

    def _has_part_of_backward(self) -> bool:
        """Return whether an interrupted backward has left gradients: a hook of the user's comes before ours."""
        left = self.optimizer.reduction.has_begun or self.optimizer.schedule.unfinished
        return left or any(param.grad is not None for param in self.optimizer.layout.params)

    def _refuse_unscaled(self) -> None:
        """Refuse a gradient of a backward that the engine does not see, and which lacks a factor of the loss."""
        if self._has_unsearched_outputs and self.gradient_accumulation_steps() > 1:
            raise RuntimeError(
                "A loss that the model returns in an object other than a tensor, tuple, list or dict is divided by "
                f"gradient_accumulation_steps ({self.gradient_accumulation_steps()}) in engine.backward(loss) only: "
                "use that, or return the loss in a dict."
            )
        if float(self.optimizer.loss_scale) != 1.0 and not self._manual_backward_expected:
            raise RuntimeError(
                "A backward that does not start at an output of the engine needs the loss scale of fp16: use "
                "engine.backward(loss) (in Lightning self.manual_backward(loss)), or engine.scale(loss).backward()."
            )

    def _count_unseen_backwards(self) -> None:
        """Count backwards that did not start at an output of the engine, such as of a loss of the bare module.

        They are part of the micro-batch before or after them in their request. Where it has none, they are one.

        Raises:
            RuntimeError: an interrupted backward has left a part of its gradients in a window that holds others.
        """
        if self.has_pending_gradients:
            self._refuse_after_interruption()
        if self.optimizer.has_unseen_gradients:
            self._manual_backward_expected = False
            if not self.update_window.request_open:
                self.optimizer.rollback.begin_request()
                self.agreement.begin_backward(last=False)
                self.update_window.count_micro_batch()
                self.agreement.end_micro_batch(False)

    def add_weight(self, weight: float | torch.Tensor) -> None:
        """Report the weight of one micro-batch, right before its backward (this rank only).

        Args:
            weight: a finite number of at least 0, such as the number of trainable tokens, or a tensor that holds one.
                A tensor is not read before the step, so it may come from the device without anybody waiting for it.

        Raises:
            ValueError: not such a number. A tensor's value is checked in ``step``.
        """
        check_weight(weight)
        if isinstance(weight, torch.Tensor):
            weight = weight.detach().reshape(()).to(self.device, get_norm_dtype(), non_blocking=True)
        self.update_window.weights.add(weight)

    # --- steps ------------------------------------------------------------------------------------------------------

    @override
    def step(
        self,
        lr_kwargs: dict[str, Any] | None = None,
        *,
        divisor: float | None = None,
        normalization: str | None = None,
    ) -> None:
        """Apply the window's gradient sum, divided, at a boundary (collective).

        Without ``divisor`` and ``normalization`` the sum is divided by nothing but DeepSpeed's mean over data-parallel
        ranks; the front ends (Lightning, Accelerate) default to ``"mean"`` instead.

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
            RuntimeError: in a block that shows gradients. On all ranks, if they give different divisors (seen where
                ``step`` reads the norm: not with the overflow check and clipping off); or a divisor is given while
                a request is open that may yet be dropped. With ``"token"`` if a micro-batch has no weight or more than
                one, or a weight is negative, infinite or NaN.
            GradientOverflowError: on all ranks, if the gradient is not finite and ``overflow`` says that the run ends.
        """
        if self.shows_gradients:
            raise RuntimeError(
                "step() in a block that shows the window's gradient in p.grad, whose changes count at its end: call it "
                "after the block."
            )
        check_normalization(normalization, divisor, self.gradient_accumulation_steps())
        if normalization == "mean" and self.options.rank_dependent_micro_batches:
            raise ValueError(f"step(normalization='mean') with rank_dependent_micro_batches: {UNEQUAL_MEANS}")
        if divisor is not None:
            check_divisor(divisor, self.update_window, drops_requests=self._drops_requests)
        at_boundary = not self.managed_gradient_accumulation() or self.is_gradient_accumulation_boundary()
        if not at_boundary or self.inside_no_sync_ctxt:
            super().step(lr_kwargs)
        elif self.has_pending_gradients:
            self._apply_window(lr_kwargs, divisor, normalization)
        else:
            self.set_gradients.leave_out(self.optimizer)
            self.optimizer.discard_window()  # an interrupted backward may have left something behind
            self._step_applied = False

    def _complete_sums(self) -> None:
        """Agree to a step, end the open request and reduce what waits (collective)."""
        self._count_unseen_backwards()
        if not self.shows_gradients:
            self.set_gradients.leave_out(self.optimizer)
        self.agree_to_step()
        self.end_request()
        with self.optimizer.rollback.suspended():
            self.optimizer.reduce_pending()
        self.optimizer.rollback.keep()

    @ends_together
    def _apply_window(self, lr_kwargs: dict[str, Any] | None, divisor: float | None, normalization: str | None) -> None:
        self._complete_sums()
        window, scale = self.update_window, float(self.optimizer.loss_scale)
        if not self._choose_divisor(divisor, normalization):
            self._skip_empty_window()
            return
        try:
            with self.next_step_clipping.applied(self.optimizer):
                super().step(lr_kwargs)
        finally:
            self._running_engine_step = False  # a step that raised is over: without it backwards would end requests
        self._record_update(window, scale)

    def _choose_divisor(self, divisor: float | None, normalization: str | None) -> bool:
        """Choose the divisor of the open window; return whether it is not zero. Collective with ``"token"``."""
        window = self.update_window
        if normalization == "token" and window.has_sum:
            return life_cycle.resolve_token_divisor(self.optimizer)
        self.optimizer.divisor.choose(float(window.divisor_of_mean() if normalization == "mean" else divisor or 1.0))
        return True

    def _skip_empty_window(self) -> None:
        """Discard a window of zero total weight. All ranks are here, since they have read the same total."""
        if self._skips.empty == 0 and self.global_rank == 0:
            warnings.warn(
                f"An update window of {self.update_window.micro_batches} micro-batches per rank has a total weight of "
                "zero over all ranks: there is nothing to divide by, so it is skipped. Further ones are only counted, "
                "in engine.empty_updates.",
                stacklevel=4,
            )
        self._skips.empty += 1
        self.zero_grad()
        self._step_applied = False
        self._global_grad_norm = self.optimizer._global_grad_norm = torch.zeros((), device=self.device)

    def prepare_divisor(self, divisor: float | None, normalization: str | None) -> float | None:
        """End the open request and choose the divisor of a window with gradients, as a step now would. Collective.

        Args:
            divisor: as for :meth:`step`.
            normalization: likewise.

        Returns:
            Divisor times loss scale, by which the window's sum is divided; ``None`` for one of zero total weight.
        """
        self._complete_sums()
        if not self._choose_divisor(divisor, normalization):
            return None
        return float(self.optimizer.loss_scale) * float(self.optimizer.divisor.value)

    def pending_norm(self, divisor: float | None) -> torch.Tensor:
        """Return the norm that a step now would report, and end the open request. Collective.

        Groups that Muon updates count with their gradients here, and with their updates in the step.

        Args:
            divisor: as for :meth:`step`; ``None`` divides by the window's total weight, as ``"token"``.

        Returns:
            A scalar on the engine's device; 0 without a window, and for one of zero total weight.
        """
        if self.has_pending_gradients:
            self._complete_sums()
            if self._choose_divisor(divisor, "token" if divisor is None else None):
                return life_cycle.pending_norm(self.optimizer).to(self.device)
            self.optimizer.norm.forget()
        return torch.zeros((), device=self.device)

    # --- backwards --------------------------------------------------------------------------------------------------

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the forward of one micro-batch, or of an evaluation.

        This rank only at stages 1 and 2. Collective at stage 3, which gathers weights: the ranks agree before. What
        :meth:`begin_request` has announced needs no agreement of its own.

        At its end a released gradient partition begins to be reloaded (CPU offload, where every backward reduces). Not
        before: what the forward needs for itself, such as logits, would meet the partition.

        Args:
            *inputs: of the model.
            **kwargs: likewise.

        Returns:
            What the model returns.

        Raises:
            RankDisagreementError: at stage 3, if another rank does something else.
        """
        self._before_forward()
        try:
            outputs = super().forward(*inputs, **kwargs)
        finally:
            self._leave_forward()
        self._after_forward(outputs)
        return outputs

    @torch.compiler.disable
    def _before_forward(self) -> None:
        self.forward_order.check()
        evaluates = not torch.is_grad_enabled()
        if self.zero_optimization_partition_weights():
            self.agreement.before_forward(evaluates)
        if not evaluates:
            self.optimizer.rollback.note_forward()
        self.forward_order.begin(follows=not evaluates or self.agreement.votes_now)

    @torch.compiler.disable
    def _leave_forward(self) -> None:
        self.forward_order.leave()

    @torch.compiler.disable
    def _after_forward(self, outputs: Any) -> None:
        self.forward_order.end()
        if torch.is_grad_enabled() and not self._has_unsearched_outputs:
            self._has_unsearched_outputs = not are_searched(outputs)
        if torch.is_grad_enabled() and self.optimizer.schedule.in_every_backward:
            self._prefetch_partitions()

    def _prefetch_partitions(self) -> None:
        if not self.inside_no_sync_ctxt:  # where nothing is reduced for now
            self.optimizer.sums.prefetch()

    @override
    def _backward_prologue(self) -> None:
        """Prepare a backward, as DeepSpeed does, and start its count of hooks anew: two forwards may come before it.

        Also reload a released gradient partition where the forward has not: with a backward that reduces. Before others
        the partition would be in the way.
        """
        task = torch._C._current_graph_task_id()
        if self.optimizer._backward_active_depth > 0 and task == self._backward_task:
            return  # a loss of several forwards: the outputs of another one have begun this backward
        if not self._running_engine_backward:
            self._refuse_after_interruption()
        self._backward_task = task
        last = self.is_gradient_accumulation_boundary()
        if last and self._is_gradient_accumulation_boundary is None:
            self.update_window.ends_with_request = True  # DeepSpeed has counted its gradient_accumulation_steps
        if self.optimizer._backward_active_depth == 0:
            self.optimizer.clear_backward_seen_flag()
            self.agreement.begin_backward(last=last)
            if self.zero_optimization_partition_weights() or self.optimizer.schedule.asks_for_memory:
                if not self.update_window.request_open:
                    self.optimizer.open_request()  # the vote may abort it, and a zero_grad() has forgotten it
                self.agreement.finish_vote()  # before the ranks gather weights, or compare their free memory
            self.forward_order.begin_backward()
            if not self.update_window.request_open:
                self.optimizer.begin_request()
        if self.optimizer.reduces_after_backward():
            self._prefetch_partitions()  # after the request before has released them
        super()._backward_prologue()

    @override
    def _backward_epilogue(self) -> None:
        """Reduce what is left, as DeepSpeed does, and count the micro-batch: once per backward, however started."""
        self.agreement.finish_vote()
        self.update_window.count_micro_batch()
        super()._backward_epilogue()
        self.optimizer.schedule.end_backward()
        if self.optimizer._backward_active_depth == 0:
            self.forward_order.end_backward()
            self.optimizer.clear_backward_seen_flag()  # or DeepSpeed takes the gradients of any other one for its rest
        self.agreement.end_micro_batch(not self.update_window.request_open)
        self._check_request()

    @override
    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Let the gradients of the block's backwards wait, and reduce them at its end, which ends the request.

        The end of the block is collective.

        Raises:
            RankDisagreementError: at the end, if another rank does something else.
        """
        with super().coalesce_grad_reduction():
            yield
        self.agreement.end_request()
        self._check_request()

    @override
    def _flush_coalesced_reduction_zero12(self, optimizer: Any) -> None:
        """Reduce what has waited; DeepSpeed's version drives its own buckets."""
        optimizer.reduce_gradients()

    @override
    def is_gradient_accumulation_boundary(self) -> bool:
        """Return false inside ``no_sync()``: its gradients stay local until a later backward reduces them."""
        if self.inside_no_sync_ctxt:
            return False
        told = self._is_gradient_accumulation_boundary
        return bool(super().is_gradient_accumulation_boundary() if told is None else told)

    # --- construction -----------------------------------------------------------------------------------------------

    @override
    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> Any:
        """Choose the ZeRO class for stage 1 in bf16 with fp32 accumulation as well, instead of ``BF16_Optimizer``."""
        wrapper = super()._do_optimizer_sanity_check(basic_optimizer)
        return ZERO_OPTIMIZATION if wrapper == BFLOAT16 else wrapper

    @override
    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer | None) -> Any:
        """Build the request-safe class in the place of DeepSpeed's."""
        options = self.options
        time = reduction_time(
            self.zero_optimization_stage(),
            options.reduce_gradients_at,
            options.overflow.on_overflow or "skip",
            unequal=options.rank_dependent_micro_batches,
            abort=options.abort,
        )
        window_options = WindowOptions(
            reduction=time,
            reduces_sums_in=self._choose_communication_dtype(time),
            retain=options.retain_gpu_grad_partition_until_step,
            records_origin=options.overflow.on_overflow == "raise",
            drops_requests=self._drops_requests,
            aborts=options.abort,
            fills_absent=options.rank_dependent_parameters,
            compares_weights=options.compare_weights,
        )
        given = [] if optimizer is None else [param for group in optimizer.param_groups for param in group["params"]]
        with optimizer_classes_in_place(self.zero_optimization_stage(), window_options):
            built = super()._configure_zero_optimizer(optimizer)
        is_ours = isinstance(built, OPTIMIZER_CLASSES)
        if not is_ours:
            raise ValueError(
                "requestzero.initialize was given no optimizer, neither as optimizer= nor in the configuration: give "
                "one, or call deepspeed.initialize for inference with stage 3."
            )
        built.check_grad_overflow = self._checks_grad_overflow()
        if options.rank_agreement:
            names = [built.param_names[param] for param in built.layout.params]
            equal = not options.rank_dependent_micro_batches
            built.ranks.agree_from_now_on(lambda: built.window, names.__getitem__, equal, options.abort)
            if self.zero_optimization_partition_weights():
                gathers = watch_gathers(built, built.ranks)
                if options.abort and built.ranks.agreement.active:
                    self.forward_order.follow(built.parameter_offload.get_param_coordinator(), self.module, gathers)
        built.on_unseen_gradient = self._refuse_unscaled
        refuse_gradients(given, built.param_names, built)
        torch_clipping.serve(self)
        return built

    def _checks_grad_overflow(self) -> bool:
        """Return whether gradients are checked; DeepSpeed tells its stage 3 nothing of it, and in fp32 no stage."""
        if self.bfloat16_enabled():
            return bool(self._config.bfloat16_config.check_grad_overflow)
        return self.fp16_enabled() or bool(self.options.overflow.check_grad_overflow)

    def _choose_communication_dtype(self, time: ReductionTime) -> torch.dtype | None:
        """Reduce fp32 sums in fp32, unless the user has chosen a dtype; return that for sums alone.

        Where they wait for a request's or a window's end, fp32 costs little and saves the sum from being rounded to 16
        bits; in every backward it would double the traffic.
        """
        _, grad_accum_dtype = self.get_data_types()
        if time.at is ReduceAt.BACKWARD or grad_accum_dtype != torch.float32 or self._config.communication_data_type:
            return None
        if not time.while_memory:
            self._config.communication_data_type = torch.float32
        return torch.float32

    @override
    def destroy(self) -> None:
        """Also leave the agreement of ranks, and PyTorch's clipping."""
        torch_clipping.leave(self)
        # At the interpreter's end the store may be gone, and would be waited for.
        if isinstance(getattr(self, "optimizer", None), OPTIMIZER_CLASSES) and not sys.is_finalizing():
            self.agreement.close()
        super().destroy()
