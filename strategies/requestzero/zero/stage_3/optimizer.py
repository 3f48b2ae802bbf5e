"""The request-safe ZeRO-3 optimizer: DeepSpeed's class, whose methods delegate to the parts that it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import utils as runtime_utils
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from typing_extensions import override

from requestzero.zero.common import life_cycle, obstacles
from requestzero.zero.common.exchanged_masters import follow_exchanges
from requestzero.zero.common.frozen_parameters import kept_still
from requestzero.zero.common.reduction_schedule import reducing_always
from requestzero.zero.common.scale import StepScale, unscale_and_clip
from requestzero.zero.common.streams import current_stream, has_streams, keep_alive
from requestzero.zero.common.window import DroppedRequest, UpdateWindow
from requestzero.zero.common.window_options import WindowOptions
from requestzero.zero.overflow import policy
from requestzero.zero.stage_3.gathers import unwatch_gathers
from requestzero.zero.stage_3.gradient_access import gather_whole, write_shard
from requestzero.zero.stage_3.kept_modules import KeptModule
from requestzero.zero.stage_3.optimizer_parts import OptimizerParts, build_parts
from requestzero.zero.stage_3.reduction import owned_parts
from requestzero.zero.stage_3.universal import separate_groups
from requestzero.zero.window_checkpoint import loading
from requestzero.zero.window_checkpoint.record import SavedWindow


class RequestZeROStage3Optimizer(DeepSpeedZeroOptimizer_Stage3):
    """DeepSpeed's ZeRO-3 optimizer, whose step applies the sum of every request of an update window, exactly.

    A window is all backwards between two steps; it starts clean whatever ended the one before it (a step, a skipped
    step, ``zero_grad()``, a loaded checkpoint). Parameters take part one by one: absent from some backwards, or from
    all of them (a zero gradient then).

    Written for DeepSpeed 0.19.8, which counts micro-steps for all parameters together, so that what comes late is added
    to the sum of the window before, and what is absent replays it. Buckets, collectives, weights, optimizer state and
    the step are DeepSpeed's.

    Built by the engine, which counts micro-batches and requests. It leaves NVMe, ZenFlow, SuperOffload, MiCS and
    experts with ranks of their own to DeepSpeed.
    """

    compute_grad_norm = True
    check_grad_overflow = True

    def __init__(self, *args: Any, window_options: WindowOptions | None = None, **kwargs: Any) -> None:
        # Before super(), whose constructor calls methods that are overridden here.
        self.window, self.scale, self.loss_scale_exhausted = UpdateWindow(), StepScale(), False
        self.schedule = reducing_always()
        self.on_unseen_gradient: Callable[[], None] = lambda: None
        """Called for every gradient of a backward that the engine does not see."""
        super().__init__(*args, **kwargs)
        self.window_options = window_options or WindowOptions()
        self._own(build_parts(self, self.window_options))
        self._kept_module = KeptModule(self.module, self.parameter_offload.get_param_coordinator())
        follow_exchanges(self)

    def _own(self, parts: OptimizerParts) -> None:
        self.layout, self.ranks, self.sums = parts.layout, parts.ranks, parts.sums
        self.reduction, self.divisor, self.norm = parts.reduction, parts.divisor, parts.norm
        self.origin, self.rollback, self.written = parts.origin, parts.rollback, parts.written
        self.window_records = [record for record in (parts.origin, parts.rollback) if record is not None]

    # --- the way of a gradient --------------------------------------------------------------------------------------

    @override
    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any) -> None:
        """Put a gradient into its bucket, unless it is there already; the bucket is reduced before if it is full."""
        if self._backward_active_depth == 0 and torch._C._current_graph_task_id() != -1:
            self.rollback.begin_request()
            self.on_unseen_gradient()
        if self.reduction.gradient_arrived(param, self.ipg_buckets[self.get_param_comm_dtype(param)]):
            super().reduce_independent_p_g_buckets_and_remove_grads(param)
        elif has_streams():
            self.reduce_and_partition_stream.wait_stream(get_accelerator().current_stream())

    @override
    def _DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(
        self, communication_data_type: torch.dtype
    ) -> None:
        """Reduce a bucket, on which the ranks have agreed (collective).

        # HACK: DeepSpeed's method is private to its class by name. It is the only place through which every reduction
        # goes, before its first collective.
        """
        bucket = self.ipg_buckets[communication_data_type]
        if bucket.params:
            with self.reduction.reducing(bucket):
                super()._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(communication_data_type)

    @override
    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> None:  # type: ignore[override]
        """Add the reduced parts that this rank owns to the window's sum; DeepSpeed asks its count of micro-steps."""
        self.sums.add(*owned_parts(self.layout, params_to_release, grad_partitions))
        for param in params_to_release:
            if param.grad is not None:
                keep_alive(param.grad, current_stream())
            param.grad = None
        self.reduction.bucket_reduced(self.grad_partitions_flat_buffer.device)

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """Reduce the rest of a backward; a reentrant checkpoint may end it several times."""
        with self.reduction.ending():
            super().independent_gradient_partition_epilogue()
        self.sums.end_backward()
        if self.is_gradient_accumulation_boundary():
            self.window.end_request()

    @override
    def finalize_gradient_accumulation_boundary(self) -> None:
        """End the open request, if there is one. What backwards have left that the engine has not seen is reduced."""
        self.set_gradient_accumulation_boundary(True)
        if self.has_unseen_gradients:
            self.independent_gradient_partition_epilogue()
        self.window.end_request()

    def reduces_after_backward(self) -> bool:
        """Return true: no gradient waits beyond its backward."""
        return True

    def begin_request(self) -> None:
        """See :meth:`open_request`."""
        self.open_request()

    def open_request(self) -> None:
        """Let what came before be there to stay, unless a request is open (this rank only)."""
        self.rollback.begin_request()

    def reduce_pending(self) -> None:
        """Do nothing, likewise."""

    @property
    def has_unseen_gradients(self) -> bool:
        """True if gradients of backwards that the engine has not seen wait in buckets, or are partly reduced."""
        return self.reduction.has_begun and self._backward_active_depth == 0

    @override
    def should_refresh_expected_hook_count(self) -> bool:
        """Count the parameters of a backward only where autograd does not tell its end, as at stages 1 and 2."""
        return super().should_refresh_expected_hook_count() and torch._C._current_graph_task_id() == -1

    # --- the step ---------------------------------------------------------------------------------------------------

    @override
    def step(self, closure: Any = None) -> None:
        """Apply the window's sum, divided, or skip it if it is not finite (collective).

        Without a backward there is nothing to apply: weights and optimizer state stay as they are.

        Raises:
            RuntimeError: a request is still open.
        """
        if life_cycle.needs_step(self):
            self.written.adopt()
            with life_cycle.applying(self), self.ranks.watching(runtime_utils, stage3):
                super().step(closure)
                if not self.overflow:
                    self.written.forget_set_masters()

    @override
    def _get_loss_scale(self) -> Any:
        """Include the divisor while a step runs."""
        return self.scale.value(super()._get_loss_scale)

    # Properties bind the function they were made with.
    loss_scale = property(lambda self: self._get_loss_scale(), DeepSpeedZeroOptimizer_Stage3._set_loss_scale)
    cur_scale = loss_scale

    @override
    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether any rank's gradient is not finite (collective, one host read, unless it was read before)."""
        return not self.norm.is_finite(self.window)

    def scaled_global_norm(self, norm_type: int = 2) -> float | torch.Tensor:
        """Return the norm over all sub-groups and ranks, times loss scale and divisor (collective).

        It is read only where something depends on it: the overflow check, or clipping. Otherwise a step gets 0, since
        DeepSpeed's would read it, and the norm is reported afterwards.
        """
        if self.check_grad_overflow or self.clip_grad > 0.0:
            return self.norm.take_total(self.window)
        norm = self.norm.total_on_device(self.window)
        self.norm.unread = norm if self.scale.is_fixed else None
        return 0.0 if self.scale.is_fixed else norm

    @override
    def _get_norm_groups(self) -> list[torch.Tensor]:
        """Return one norm for all sub-groups (collective). DeepSpeed has one for each, and combines them."""
        if not self.scale.is_fixed:
            self.norm.forget()
        return [torch.as_tensor(self.scaled_global_norm())]

    @override
    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        """Let the step read the sum where it lies; DeepSpeed concatenates its parts to a copy."""
        master = self.fp32_partitioned_groups_flat[sub_group_id]
        master.grad = self.sums.stretches()[sub_group_id].to(master.dtype)

    @override
    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """Divide by loss scale, divisor and clipping factor at once."""
        gradient = self.fp32_partitioned_groups_flat[sub_group_id].grad
        assert gradient is not None
        norm = float(total_norm) if self.clip_grad > 0.0 else 0.0
        unscale_and_clip([gradient], float(self.loss_scale), norm, self.clip_grad)

    @override
    def _optimizer_step(self, sub_group_id: int) -> None:
        """Also keep frozen parameters as they are."""
        with self._kept_still(sub_group_id):
            super()._optimizer_step(sub_group_id)

    def _kept_still(self, sub_group_id: int) -> AbstractContextManager[None]:
        master = self.fp32_partitioned_groups_flat[sub_group_id]
        return kept_still(self.layout.frozen(sub_group_id), master, self.optimizer.state)

    @property
    def norm_is_final(self) -> bool:
        """True unless gradients become Muon updates first."""
        return not self.use_muon

    @override
    def _apply_muon_to_accumulated_grads(self) -> None:
        """Also divide the sums on the device before they become updates, as DeepSpeed does under CPU offload.

        Not where the step is about to be skipped: momentum would keep what is not finite (DeepSpeed asks in fp16 only).
        """
        if not self.use_muon or (self.check_grad_overflow and self.has_overflow()):
            return
        if not self.offload_optimizer:
            self._divide_sums_for_muon()
        with ExitStack() as frozen:
            for index, uses_muon in enumerate(self.sub_groups_using_muon):
                if uses_muon:
                    frozen.enter_context(self._kept_still(index))  # the momentum
            super()._apply_muon_to_accumulated_grads()
        self.sums.zero_frozen()  # momentum alone makes an update, which would count in the norm
        self.norm.forget()

    def _divide_sums_for_muon(self) -> None:
        self._expose_sums()
        for stretch, uses_muon in zip(self.sums.stretches(), self.sub_groups_using_muon, strict=True):
            if uses_muon:
                unscale_and_clip([stretch], float(self.loss_scale), 0.0, 0.0)

    def _expose_sums(self) -> None:
        """Let DeepSpeed's Muon find the sums of parameters, by sub-group."""
        self.averaged_gradients = {
            index: [self.sums.shard(number) for number in group] for index, group in enumerate(self.layout.groups)
        }

    @override
    def _update_scale(self, has_overflow: bool = False) -> None:
        """Also find the origin of an overflow, while the gradients are still there (collective then)."""
        policy.adjust_scale(self, has_overflow, super()._update_scale)

    # --- the end of a window ----------------------------------------------------------------------------------------

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the open window; DeepSpeed's step, which also calls this, means the gradients of parameters only."""
        super().zero_grad(set_to_none)
        if not self.scale.is_fixed:
            self.discard_window()

    def discard_window(self) -> None:
        """Forget every gradient since the last step, reduced or not, and begin a new window (this rank only)."""
        life_cycle.discard(self)

    def discard_gradients(self) -> None:
        """Forget the sum, and what an interrupted backward has left in buckets and on parameters."""
        self.reduction.abandon()
        self.sums.discard()
        self.averaged_gradients = {}
        self.sub_groups_lacking_loss_scale.clear()

    @override
    def checkpoint_event_prologue(self) -> None:
        """Also take over weights that were written since the last step, before small ones are released."""
        self.written.adopt()
        super().checkpoint_event_prologue()

    @contextmanager
    def exchanging_masters(self) -> Iterator[None]:
        """Let the model follow a method that exchanges master weights, as schedule-free optimizers do (collective)."""
        self.checkpoint_event_prologue()
        with self._masters_in_groups():
            yield
        for weights, masters in zip(self.fp16_partitioned_groups_flat, self.fp32_partitioned_groups_flat, strict=True):
            weights.data.copy_(masters.data)
        self.written.forget_set_masters()
        self.checkpoint_event_epilogue()

    @contextmanager
    def _masters_in_groups(self) -> Iterator[None]:
        """Put the masters into the user's parameter groups, which DeepSpeed leaves empty but in the step."""
        groups = self.optimizer.param_groups
        before = [group["params"] for group in groups]
        self._clear_fp32_optimizer_param_groups()
        self._set_fp32_optimizer_param_groups()
        try:
            yield
        finally:
            for group, params in zip(groups, before, strict=True):
                group["params"] = params

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Also discard the open window: pending gradients belong to the weights before the load."""
        self.discard_window()
        super().load_state_dict(*args, **kwargs)
        self.written.forget_set_masters()

    @override
    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """Load a universal checkpoint, with hyperparameters and step counts that groups do not share."""
        super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
        separate_groups(self.optimizer, self.fp32_partitioned_groups_flat, Path(checkpoint_dir))

    def load_window(self, folder: Path, saved: SavedWindow) -> None:
        """Go on with the open window of a checkpoint, whose weights and state are loaded (this rank only)."""
        loading.load(self, folder, saved)

    def check_request(self) -> DroppedRequest | None:
        """Undo the request that has just ended if the window's sum is not finite now (collective, one host read)."""
        return policy.check_request(self)

    @property
    def abort_obstacle(self) -> str:
        """The reason for which the request at hand cannot be undone; empty where it can."""
        if self.rollback.is_first or self.rollback.is_next(self.window):
            return ""
        return obstacles.NO_COPY if self.rollback.is_lost else self.rollback.obstacle

    def abort_request(self) -> None:
        """Undo the request at hand, which has no :attr:`abort_obstacle` (this rank only)."""
        if not self.rollback.is_next(self.window):
            self.reduction.abandon()
        life_cycle.undo_request(self)
        life_cycle.forget_backward(self)

    @override
    def destroy(self) -> None:
        """Give up views of the sum first, which DeepSpeed would free as if they were memory of their own."""
        unwatch_gathers(self, self.ranks)
        if self.sums.host is not None:
            self.sums.host.release()
        super().destroy()
        self._kept_module.forget()

    # --- what users read and write ----------------------------------------------------------------------------------

    @override
    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[torch.Tensor, int]:
        """Return this rank's part of a parameter's sum, zero where the window has none, and the sub-group's index."""
        if has_streams():
            self.reduce_and_partition_stream.synchronize()
        number = self.layout.id_of(param)
        shard = self.sums.begin(number) if self.window.is_open else torch.zeros_like(self.sums.shard(number))
        return shard, self.grad_position[self.get_param_id(param)][0]

    @override
    def get_fp32_grad_for_param(self, param: Any) -> torch.Tensor | None:
        """Return a parameter's whole sum in fp32 (collective)."""
        shard = self.get_local_fp32_grad_for_param(param)
        return None if shard is None else gather_whole(shard, param, self._get_param_partition_group(param))

    @override
    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        """Set a parameter's sum, of which this rank keeps its part."""
        if param.requires_grad:
            shard, _ = self._get_fp32_grad_state_partition(param, False)
            write_shard(shard, value, self._get_param_partition_rank(param))
            self._note_edit()

    @override
    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        """Set this rank's part of a parameter's sum, padding included."""
        super().set_local_grad_for_param(value, param)
        self._note_edit()

    @override
    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: list[Any]) -> None:
        """Replace sums by ``update_func(sum, parameter)``, one parameter after another (collective)."""
        for param in param_list:
            if param.requires_grad:
                self.set_fp32_grad_for_param(update_func(self.get_fp32_grad_for_param(param), param), param)

    @override
    def set_full_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Set a master weight, or an optimizer state of one, of which this rank keeps its part."""
        if param.requires_grad:
            shard, _ = self._get_fp32_opt_state_partition(param, False, optim_state_key)
            write_shard(shard.data, value, self._get_param_partition_rank(param))
            self._note_master(param, optim_state_key)

    @override
    def set_local_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Set this rank's part of a master weight, or of an optimizer state of one, padding included."""
        super().set_local_hp_param(value, param, optim_state_key)
        self._note_master(param, optim_state_key)

    def _note_master(self, param: Any, optim_state_key: str | None) -> None:
        if param.requires_grad and optim_state_key is None:
            self.written.note_master(param)

    def _note_edit(self) -> None:
        self.sums.note_change()
        self.rollback.note_edit()
        if self.origin is not None:
            self.origin.note_edit()

    @override
    def empty_partition_cache(self) -> None:
        """Also take over weights that were written since the last step, which the release would discard."""
        self.written.adopt()
        super().empty_partition_cache()

    @override
    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Also follow the sums."""
        super().offload_states(*args, **kwargs)
        self.sums.note_move()
        self.rollback.move("cpu")

    @override
    def reload_states(self, non_blocking: bool = False) -> None:
        """Also follow the sums back."""
        super().reload_states(non_blocking)
        self.sums.note_move()
        self.rollback.move(get_accelerator().current_device_name())
