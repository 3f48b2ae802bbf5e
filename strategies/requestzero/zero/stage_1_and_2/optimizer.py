"""The request-safe ZeRO-1/2 optimizer: DeepSpeed's class, whose methods delegate to the parts that it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import utils as runtime_utils
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from typing_extensions import override

from requestzero.zero.common import life_cycle, obstacles
from requestzero.zero.common.exchanged_masters import follow_exchanges
from requestzero.zero.common.frozen_parameters import kept_still
from requestzero.zero.common.scale import StepScale, unscale_and_clip
from requestzero.zero.common.window import DroppedRequest, UpdateWindow
from requestzero.zero.common.window_options import WindowOptions
from requestzero.zero.overflow import policy
from requestzero.zero.stage_1_and_2 import gradient_hooks, model_weights
from requestzero.zero.stage_1_and_2.full_gradients import before_reading, before_writing
from requestzero.zero.stage_1_and_2.optimizer_parts import OptimizerParts, build_parts, is_muon_group
from requestzero.zero.window_checkpoint import loading
from requestzero.zero.window_checkpoint.record import SavedWindow


class RequestZeROOptimizer(DeepSpeedZeroOptimizer, torch.optim.Optimizer):  # type: ignore[misc]
    """DeepSpeed's ZeRO-1/2 optimizer, whose step applies the sum of every request of an update window, exactly.

    A window is all backwards between two steps; it starts clean whatever ended the one before it (a step, a skipped
    step, ``zero_grad()``, a loaded checkpoint). Parameters take part one by one: absent from some backwards, or from
    all of them (a zero gradient then).

    Written for DeepSpeed 0.19.8, which counts micro-steps for all parameters together, drops or replays sums at
    gradient accumulation boundaries, and reads the host for every gradient under CPU offload. The way of a gradient
    from its hook to the sum that the step reads is this package's own; hooks, the step, weights and optimizer state are
    DeepSpeed's.

    It is a ``torch.optim.Optimizer`` to schedulers and others that ask; what else it lacks is that of the user's own
    optimizer, which updates the partitions.

    Built by the engine, which counts micro-batches and requests. It leaves ZenFlow and pipelines to DeepSpeed.
    """

    on_unseen_gradient: Callable[[], None] = staticmethod(lambda: None)
    """Called for every gradient of a backward that the engine does not see."""
    _unseen: bool = False
    """Such gradients wait."""

    def __init__(self, *args: Any, window_options: WindowOptions | None = None, **kwargs: Any) -> None:
        # Before super(), whose constructor calls methods that are overridden here.
        self.window, self.scale, self.loss_scale_exhausted = UpdateWindow(), StepScale(), False
        self._parts: OptimizerParts | None = None
        super().__init__(*args, **kwargs)
        self.window_options = window_options or WindowOptions()
        self._own(build_parts(self, self.window_options, lambda: self.window.is_open))
        follow_exchanges(self)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's optimizer that DeepSpeed's class does not have."""
        own = self.__dict__.get("optimizer")
        if own is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(own, name)

    @contextmanager
    def exchanging_masters(self) -> Iterator[None]:
        """Let the model follow a method that exchanges master weights, as schedule-free optimizers do (collective)."""
        self.written.adopt()
        yield
        self.update_lp_params()
        self.written.forget_set_masters()

    @override
    def add_param_group(self, param_group: Any) -> None:
        """Refuse: partitions are laid out once.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "add_param_group() is not possible with ZeRO, which lays out the partitions of all parameters when the "
            "engine is built: give the optimizer all groups from the start, and freeze those that are trained later "
            "right after the engine is built (in Lightning in on_train_start); a frozen parameter stays as it is."
        )

    def _own(self, parts: OptimizerParts) -> None:
        self._parts = parts
        self.layout, self.ranks, self.sums, self.local = parts.layout, parts.ranks, parts.sums, parts.local
        self.schedule, self.reduction = parts.schedule, parts.reduction
        self.divisor, self.norm, self.written = parts.divisor, parts.norm, parts.written
        self.origin, self.rollback, self.gathers = parts.origin, parts.rollback, parts.gathers
        gradient_hooks.shorten(self)
        records = (parts.schedule, parts.origin, parts.rollback)
        self.window_records = [record for record in records if record is not None]
        self._link_fragments()

    # --- the way of a gradient --------------------------------------------------------------------------------------

    @override
    def process_gradients(self, param: Any, i: int) -> None:
        """Handle a gradient that autograd has brought; inside ``coalesce_grad_reduction()`` it waits.

        So does one of a backward that the engine does not see, since it does not start at an output of the engine.
        """
        unseen = self._backward_active_depth == 0
        self._add_to_window(param, unseen)
        if unseen:
            self.on_unseen_gradient()
        elif not self._coalesce_grad_reduction and self.schedule.on_arrival(self.reduces_after_backward):
            self.reduction.send(param)
        else:
            self.schedule.keep_waiting(_autograd_tells_end)

    def _add_to_window(self, param: Any, unseen: bool) -> None:
        """Prepare the window for a gradient; add it to those of the rank where they wait for a later reduction."""
        if unseen and not self.rollback.is_open:
            self._open_unseen_request()
        self._unseen |= unseen
        if not self.schedule.in_every_backward:
            self.schedule.pending = True
            self.schedule.unfinished |= not unseen
            if not unseen or self.use_grad_accum_attribute:
                self.local.accumulate(param)  # else ``module.zero_grad()`` takes it back

    def _open_unseen_request(self) -> None:
        """Begin a request with a backward that the engine does not see, in the middle of it."""
        if self.schedule.at_next_request and self.schedule.pending:
            self.rollback.obstacle = obstacles.UNSEEN  # what waits cannot be reduced here, and is added to
        else:
            self.open_request()

    @property
    def has_unseen_gradients(self) -> bool:
        """True if gradients of backwards wait that the engine has not seen."""
        if not self._grad_acc_hooks:  # nobody has told of any; what is counted has been moved
            return any(param.grad is not None for param in self.layout.params)
        return self._unseen and any(map(self.local.waits, self.layout.params))

    def reduces_after_backward(self) -> bool:
        """Return whether the backward at hand is followed by a reduction, as far as is known."""
        return self.schedule.reduces(self.is_gradient_accumulation_boundary(), self.window.ends_with_request)

    @override
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """End a backward that ends its request: at stage 1, and at both after ``coalesce_grad_reduction()``.

        Nothing where nothing has come since the last request end: a step asks again after it.
        """
        if self.window.request_open:
            self._end_backward(self.reduction.reduce_local)

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """End a backward of stage 2; nothing where none has come since the last request end."""
        if self.window.request_open:
            alone = self.schedule.in_every_backward and not self._unseen
            self._end_backward(self.reduction.end_backward if alone else self.reduction.reduce_local)

    def _end_backward(self, reduce: Callable[[], None]) -> None:
        if self.reduces_after_backward():
            self._reduce(reduce)
        elif self._unseen or not self._grad_acc_hooks:
            self._keep_gradients()
        if self.is_gradient_accumulation_boundary():
            self.end_request()
        self._expose_sums()

    def _reduce(self, reduce: Callable[[], None]) -> None:
        reduce()
        self.schedule.end_reduction()
        self._unseen = False
        self.sums.end_backward()

    def _keep_gradients(self) -> None:
        """Move gradients to where they wait, for which a hook sees to those of backwards that the engine sees."""
        self.schedule.pending = True
        for param in self.layout.params:
            self.local.accumulate(param)

    def reduce_pending(self) -> None:
        """Reduce what earlier backwards have left waiting. Collective; nothing where there is nothing."""
        if self.schedule.pending and self.window.has_sum:
            saved = self.is_gradient_accumulation_boundary()
            self.set_gradient_accumulation_boundary(True)
            try:
                self._reduce(self.reduction.reduce_local)
            finally:
                self.set_gradient_accumulation_boundary(saved)
            self.sums.end_request(undoable=self._undoes_open_request)
            self._expose_sums()

    def begin_request(self) -> None:
        """Decide anew whether gradients may wait. Collective with ``reduce_gradients_at="auto"`` at stage 2.

        Also collective where :meth:`open_request` is, unless that was called.
        """
        if self.schedule.gives_up():
            with self.rollback.suspended():
                self.reduce_pending()
            self.schedule.give_up()
        self.open_request()

    def open_request(self) -> None:
        """Let what came before be there to stay, unless a request is open. Collective at stage 1 with ``abort``."""
        if self.rollback.is_open:
            return
        unseen = self._unseen
        if self.schedule.at_next_request:
            with self.rollback.suspended():
                self.reduce_pending()
        if self.window_options.aborts and self.window.has_sum:
            self.sums.end_request()
        self.rollback.begin_request()
        if unseen and self.schedule.at_next_request:
            self.rollback.obstacle = obstacles.UNSEEN

    @property
    def _undoes_requests(self) -> bool:
        """True if a request may be undone after its end."""
        return self.window_options.aborts or self.window_options.drops_requests

    @property
    def _undoes_open_request(self) -> bool:
        """True if the request at hand may be undone in its middle: with these options, or where its sums are saved."""
        return self._undoes_requests or self.rollback.has_saved_sums

    def end_request(self) -> None:
        """Bring the sums to where they are kept between requests (this rank only)."""
        if not self.schedule.pending:
            self.sums.end_request(undoable=self._undoes_requests)
        self._unseen = False
        self.window.end_request()

    def _expose_sums(self) -> None:
        """Let DeepSpeed's step and ``safe_get_full_grad`` find sums on the device."""
        for index, accumulator in enumerate(self.sums.accumulators):
            self.averaged_gradients[index] = accumulator.step_gradient

    @override
    def finalize_gradient_accumulation_boundary(self) -> None:
        """End the open request of stage 2; harmless when nothing has come since the last request end."""
        if self.window.request_open:
            self.set_gradient_accumulation_boundary(True)
            if self._unseen:
                self._reduce(self.reduction.reduce_local)
            self.end_request()
            self._expose_sums()

    @override
    def should_refresh_expected_hook_count(self) -> bool:
        """Count the parameters of a backward only where autograd does not tell its end.

        The count walks over all parameters of the model, a fifth of the backward of a model with many small ones.
        Outside a graph task of autograd DeepSpeed is left to count, which raises there.
        """
        return not _autograd_tells_end() and super().should_refresh_expected_hook_count()

    @override
    def configure_autoep_folding_tp_gradient_reduction(self, folding_spec: Any) -> None:
        """Correct gradients of folded experts before their reduction, where DeepSpeed's own path does."""
        super().configure_autoep_folding_tp_gradient_reduction(folding_spec)
        if self.autoep_folding_tp_group is not None:
            self.reduction.observers.append(
                lambda _, param, gradient: self._maybe_reduce_autoep_folding_tp_gradient(param, gradient)
            )

    # --- the step ---------------------------------------------------------------------------------------------------

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as DeepSpeed's
        """Apply the window's sum, divided, or skip it if it is not finite (collective).

        Without a backward there is nothing to apply: weights and optimizer state stay as they are.

        Raises:
            RuntimeError: a request is still open.
        """
        if life_cycle.needs_step(self):
            self.written.adopt()
            self.reduce_pending()
            with life_cycle.applying(self), self.ranks.watching(runtime_utils, stage_1_and_2):
                self._expose_sums()
                self.apply_sums(closure)
                self._follow_masters()

    def _follow_masters(self) -> None:
        """Forget which masters a user has set, once the weights are what a step has made of them."""
        if not self.overflow:
            self.written.forget_set_masters()

    def apply_sums(self, closure: Any) -> None:
        """Let DeepSpeed's step apply the sums, which are complete."""
        with self.gathers.replaced():
            super().step(closure)

    @override
    def _optimizer_step(self, group_no: int) -> None:
        """Also keep frozen parameters as they are, and gather the groups that have stepped meanwhile."""
        self.gathers.begin(group_no)
        with self._kept_still(group_no):
            super()._optimizer_step(group_no)

    def _kept_still(self, group_no: int) -> AbstractContextManager[None]:
        master = self.single_partition_of_fp32_groups[group_no]
        return kept_still(self.layout.frozen(group_no), master, self.optimizer.state)

    @override
    def _get_loss_scale(self) -> Any:
        """Include the divisor while a step runs."""
        return self.scale.value(super()._get_loss_scale)

    # Properties bind the function they were made with.
    loss_scale = property(lambda self: self._get_loss_scale(), DeepSpeedZeroOptimizer._set_loss_scale)
    cur_scale = loss_scale

    @override
    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether any rank's gradient is not finite (collective, one host read, unless it was read before)."""
        return not self.norm.is_finite(self.window)

    @override
    def scaled_global_norm(self, norm_type: int = 2) -> float | torch.Tensor:
        """Return the norm over all groups and ranks, times loss scale and divisor (collective).

        It is read only where something depends on it: the overflow check, clipping, or the check for unused parameters.
        Otherwise a step gets 0, since DeepSpeed's would read it, and the norm is reported afterwards.
        """
        if self.check_grad_overflow or self.clip_grad > 0.0 or self.norm.refuses_unused:
            return self.norm.take_total(self.window)
        norm = self.norm.total_on_device(self.window)
        self.norm.unread = norm if self.scale.is_fixed else None
        return 0.0 if self.scale.is_fixed else norm

    @override
    def unscale_and_clip_grads(self, grad_groups_flat: list[torch.Tensor], total_norm: Any) -> None:
        """Divide by loss scale, divisor and clipping factor at once."""
        norm = float(total_norm) if self.clip_grad > 0.0 else 0.0
        unscale_and_clip(grad_groups_flat, float(self.loss_scale), norm, self.clip_grad)

    @property
    def norm_is_final(self) -> bool:
        """True if the norm of the sums is wanted and no group's gradients become Muon updates first."""
        return self.compute_grad_norm and not self._muon_groups()

    def _muon_groups(self) -> list[int]:
        return [index for index in range(len(self.bit16_groups)) if is_muon_group(self, index)]

    @override
    def _apply_muon_updates_cpu_offload(self) -> None:
        """Also take over the norms of the updates that gradients of Muon groups have become."""
        with ExitStack() as frozen:
            for index in self._muon_groups():
                frozen.enter_context(self._kept_still(index))  # the momentum
            super()._apply_muon_updates_cpu_offload()
        for param_id, norm in self.norm_for_param_grads.items():
            if not self.layout.params[param_id].requires_grad:
                norm.zero_()  # momentum alone makes an update
        if self._muon_groups():
            self.sums.replace_norms(self._muon_groups(), self.norm_for_param_grads)
            self.norm.forget()

    @override
    def _update_scale(self, has_overflow: bool = False) -> None:
        """Also find the origin of an overflow, while the gradients are still there (collective then)."""
        policy.adjust_scale(self, has_overflow, super()._update_scale)

    # --- the end of a window ----------------------------------------------------------------------------------------

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the open window, at both stages; ``set_to_none`` is accepted and makes no difference."""
        self.discard_window()

    def discard_window(self) -> None:
        """Forget every gradient since the last step, reduced or not, and begin a new window (this rank only)."""
        life_cycle.discard(self)

    def discard_gradients(self) -> None:
        """Forget sums, and what an interrupted backward has left in buckets and on parameters."""
        self.reduction.abandon()  # first: it waits for reductions that still add to the sums
        self.sums.discard()
        for index in range(len(self.bit16_groups)):
            self.averaged_gradients[index] = self.all_grad_tensors[index] = None
        self._unseen = False

    @override
    def state_dict(self) -> dict[str, Any]:
        """Also take over weights that were written since the last step (this rank only)."""
        self.written.adopt()
        return super().state_dict()

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Also discard the open window: pending gradients belong to the weights before the load."""
        self.discard_window()
        super().load_state_dict(*args, **kwargs)
        self.written.forget_set_masters()

    def load_window(self, folder: Path, saved: SavedWindow) -> None:
        """Go on with the open window of a checkpoint, whose weights and state are loaded (this rank only)."""
        loading.load(self, folder, saved)
        self._expose_sums()

    def check_request(self) -> DroppedRequest | None:
        """Undo the request that has just ended if the window's sum is not finite now (collective, one host read)."""
        dropped = policy.check_request(self)
        if dropped is None and not self.window_options.aborts:
            self.sums.end_request()
        self._expose_sums()
        return dropped

    @property
    def abort_obstacle(self) -> str:
        """The reason for which the request at hand cannot be undone; empty where it can."""
        rollback = self.rollback
        if rollback.is_first or rollback.is_next(self.window):
            return ""
        if rollback.is_lost or (self.schedule.mixes_requests and self._has_gradients_of_request()):
            return obstacles.NO_COPY
        return rollback.obstacle

    def _has_gradients_of_request(self) -> bool:
        """Return whether the request at hand has brought any."""
        came = self.window.micro_batches > self.rollback.before().micro_batches
        return came or self.schedule.unfinished or self.has_unseen_gradients

    def abort_request(self) -> None:
        """Undo the request at hand, which has no :attr:`abort_obstacle` (this rank only)."""
        if not (self.schedule.mixes_requests or self.rollback.is_next(self.window)):
            self.reduction.abandon()
            self.schedule.end_reduction()
            self.schedule.end_backward()
        life_cycle.undo_request(self)
        life_cycle.forget_backward(self)
        self._unseen = False
        self._expose_sums()

    # --- what users read and write ----------------------------------------------------------------------------------

    @override
    def _link_all_hp_params(self) -> None:
        """Link parameters to fragments in the order of the flat memory.

        # HACK: DeepSpeed walks ``bit16_groups`` here, the order before round_robin_gradients permutes it, and so links
        # parameters to each other's fragments. Without round robin both lists are the same.
        """
        original, self.bit16_groups = self.bit16_groups, self.round_robin_bit16_groups
        try:
            super()._link_all_hp_params()
        finally:
            self.bit16_groups = original
        self._link_fragments()

    def _link_fragments(self) -> None:
        if self._parts is not None:
            self.written.link()
            model_weights.number_fragments(self.layout.groups, self.layout.params)
            self._get_offload_gradient_dict()
            before_writing(self.layout.params, self._begin_edit)
            if not self.schedule.in_every_backward:
                before_reading(self.layout.params, self.reduce_pending)

    def _begin_edit(self, param: Any) -> None:
        """Drop what waits on a parameter whose sum a user sets; the request at hand cannot be undone any more."""
        self.rollback.note_edit()
        if not self.schedule.in_every_backward:
            self.local.clear(param)

    @override
    def _get_offload_gradient_dict(self) -> None:
        """Let ``safe_get_full_grad`` find the sum wherever it is; DeepSpeed gives it slices of the host gradient."""
        if self._parts is not None:
            self.offload_gradient_dict.update(self._parts.fragments)

    @override
    def update_offload_overflow_tracker(self, grad: torch.Tensor | None) -> None:
        """Note that a user has set a gradient, which is when DeepSpeed calls this. Reads nothing."""
        self.sums.note_edit()
        if self.origin is not None:
            self.origin.note_edit()

    @override
    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Also move the sums, and gradients that are not reduced yet."""
        super().offload_states(*args, **kwargs)
        if OffloadStateTypeEnum.lp_grads in self.offloaded_states:
            self._move_gradients("cpu")

    @override
    def reload_states(self, non_blocking: bool = False) -> None:
        """Also move them back."""
        moved = OffloadStateTypeEnum.lp_grads in self.offloaded_states
        super().reload_states(non_blocking)
        if moved:
            self._move_gradients(get_accelerator().current_device_name())

    def _move_gradients(self, device: str) -> None:
        self.sums.move(device)
        self.rollback.move(device)
        for param in self.layout.params:
            self.local.move(param, device)

    @override
    def _update_model_bit16_weights(self, group_index: int) -> None:
        """Make parameters views of the flat weights only where they are none; DeepSpeed does it in every step."""
        params, metas = self.round_robin_bit16_groups[group_index], self.round_robin_bit16_meta[group_index]
        offsets = self.round_robin_bit16_offsets[group_index]
        if not model_weights.are_views_of(self.bit16_groups_flat[group_index], params, metas, offsets):
            super()._update_model_bit16_weights(group_index)


def _autograd_tells_end() -> bool:
    """Return whether autograd will call DeepSpeed at the end of the backward at hand, so that no hook looks for it."""
    return torch._C._current_graph_task_id() != -1
