"""The request-safe ZeRO-1/2 optimizer: the life cycle of an update window."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from typing_extensions import override

from requestzero.zero.agreed import AgreedReduction
from requestzero.zero.device_sum import DeviceSum
from requestzero.zero.grad_norm import WindowNorm
from requestzero.zero.host_sum import HostSum
from requestzero.zero.overflow_origin import OverflowOrigin
from requestzero.zero.request_backup import RequestBackup


class RequestZeROOptimizer(AgreedReduction, RequestBackup, OverflowOrigin, HostSum, DeviceSum, WindowNorm):
    """DeepSpeed's ZeRO-1/2 optimizer, whose step applies the sum of every request of an update window, exactly.

    A window is all backwards between two steps; it starts clean whatever ended the one before it (a step, a skipped
    step, ``zero_grad()``, a loaded checkpoint). Parameters take part one by one: absent from some backwards, or from
    all of them (a zero gradient then).

    Built by :class:`~requestzero.zero.engine.RequestZeROEngine`, which counts micro-batches and requests. It does
    not save the gradients of an open window, and leaves ZenFlow, ZeRO-3 and pipelines to DeepSpeed.
    """

    @override
    def step(self, closure: Any = None) -> None:
        """Apply the window's sum, divided by ``window.divisor``, or skip it if it is not finite (collective).

        Without a backward there is nothing to apply: weights and optimizer state stay as they are.

        Raises:
            RuntimeError: a request is still open (the engine's ``step`` ends it first).
        """
        # Decided by what every rank has done alike, not by what a rank owns: it may own nothing but padding.
        if not self.window.is_open:
            return
        if self.window.request_open:
            raise RuntimeError(
                f"optimizer.step() with an open request ({self.window.micro_batches} micro-batches in this window): "
                "call engine.step(), which ends it, or engine.end_request() before."
            )
        if not self.window.has_sum:
            self._skip_without_sum()
            return
        if not self.window.by_weight:
            self.forget_norms()  # of a step by weight that was given up
        self.freeze_scale(self.window.divisor)
        try:
            if self.cpu_offload:
                self.judge_unjudged()
            else:
                self.apply_muon_to_sums()
            super().step(closure)
            if self.unread_norm is not None:
                self._global_grad_norm, self.unread_norm = self.unread_norm / float(self.loss_scale), None
        finally:
            self.thaw_scale()
        if isinstance(self._global_grad_norm, float):
            self._global_grad_norm = torch.tensor(self._global_grad_norm)  # a tensor, as DeepSpeed gives
        self.discard_window()

    def _skip_without_sum(self) -> None:
        """Every request of the window was dropped: like a window that is not finite as a whole."""
        self.overflow, self.loss_scale_exhausted = True, False
        self.overflow_cause = self.window.dropped[-1].cause
        self._global_grad_norm = torch.tensor(float("inf"))
        self.discard_window()

    @override
    def weigh_window(self) -> bool:
        """Also bring the norms up to date that are read with the weights."""
        if self.cpu_offload:
            self.judge_unjudged()
        return super().weigh_window()

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the open window, at every stage; ``set_to_none`` is accepted and makes no difference."""
        self.discard_window()

    def discard_window(self) -> None:
        """Forget every gradient since the last step, reduced or not, and start a new window (this rank only)."""
        # Their memory may be used anew from here on, and a copy into it may be under way.
        self._wait_for_partitions(get_accelerator().current_stream())
        for group_idx in self.group_indices:
            self.averaged_gradients[group_idx] = None
            self.all_grad_tensors[group_idx] = None
        for group in self.bit16_groups:
            for param in group:
                param.grad = None
                param.grad_accum = None
        if self.cpu_offload:
            self.norm_for_param_grads.clear()
            self.accumulated_grads_in_cpu.clear()
        self._abandon_reduction()
        self.forget_norms()
        self.forget_good_end()
        self.window = self.window.successor()

    def _abandon_reduction(self) -> None:
        """Empty the buckets and the backward's state, in case an exception has interrupted a backward."""
        if any(bucket.elements for bucket in self.ipg_buckets.values()):
            # Interrupted: what is still under way on another stream must not meet memory that is used anew.
            get_accelerator().synchronize()
        for bucket in self.ipg_buckets.values():
            bucket.clear()
        self.extra_large_param_to_reduce.clear()
        for gradients in self.previous_reduced_grads.values():
            gradients.clear()
        self.params_already_reduced = [False] * len(self.params_already_reduced)
        self.forget_bucket()
        self._release_ipg_buffers()
        self._backward_active_depth = 0

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Also discard the open window: pending gradients belong to the weights before the load."""
        self.discard_window()
        super().load_state_dict(*args, **kwargs)

    @override
    def _link_all_hp_params(self) -> None:
        """With parameters in the order of the flat buffer.

        # HACK: DeepSpeed walks ``bit16_groups`` here, the order before round_robin_gradients permutes it, and so links
        # parameters to each other's fragments. Without round robin both lists are the same.
        """
        original, self.bit16_groups = self.bit16_groups, self.round_robin_bit16_groups
        try:
            super()._link_all_hp_params()
        finally:
            self.bit16_groups = original

    @override
    def _update_model_bit16_weights(self, group_index: int) -> None:
        """Only where a parameter is no view of the flat weights yet; DeepSpeed makes all views anew in every step."""
        flat = self.bit16_groups_flat[group_index]
        places = zip(self.round_robin_bit16_meta[group_index], self.round_robin_bit16_offsets[group_index], strict=True)
        for param, (meta, offset) in zip(self.round_robin_bit16_groups[group_index], places, strict=True):
            in_place = param.data_ptr() == flat.data_ptr() + offset * flat.element_size()
            if not (in_place and param.shape == meta.shape and param.is_contiguous()):
                super()._update_model_bit16_weights(group_index)
                return
