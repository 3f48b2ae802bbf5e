"""The window's running sum under CPU offload: the host gradient is the sum, the device partition a cache of it.

Two kinds of parameter groups:

- With fp32 accumulation on a 16-bit model the sum is built in a flat fp32 partition on the device, which is copied to
  the host gradient at request ends; see :mod:`requestzero.zero.partition_traffic`.
- Otherwise there is no partition-sized buffer on the device: what a reduced bucket brings is added to the slices of the
  host gradient that belong to it, by way of the device.

No auxiliary host buffer exists in either.
"""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator
from typing_extensions import override

from requestzero.zero.bucket_runs import Run
from requestzero.zero.grad_norm import gradient_norms
from requestzero.zero.partition_traffic import TravellingPartition


class GradientFragments:
    """Gradient slices of a group's owned parameters for ``safe_get_full_grad`` and ``safe_set_full_grad``.

    Stands in for DeepSpeed's list of slices of the host gradient. Looked up when used, since the sum moves: into the
    device partition while that is resident (a value set there is not overwritten by the next publication), else the
    host.
    """

    def __init__(self, optimizer: HostSum, group_idx: int) -> None:
        self._optimizer = optimizer
        self._group_idx = group_idx

    def __getitem__(self, index: int) -> torch.Tensor:
        param = self._optimizer.params_in_partition[self._group_idx][index]
        partition = self._optimizer.resident_partition(self._group_idx)
        # A copy that is still under way would be missed by a read, and would overwrite a write.
        if partition is None:
            self._optimizer._wait_for_offload_copies()
            self._optimizer.adopt_host_gradient(param)
        else:
            self._optimizer._wait_for_partitions(get_accelerator().current_stream())
        return self._optimizer.owned_slice(param, partition)

    def clear(self) -> None:
        """Nothing is held here (called when states are offloaded)."""


class HostSum(TravellingPartition):
    """Written for DeepSpeed 0.19.8.

    Replaces its per-parameter boundary copies, host accumulators and host reads. Can go when DeepSpeed keeps the sum of
    several requests under CPU offload and records participation per parameter.
    """

    # --- a backward -------------------------------------------------------------------------------------------------

    @override
    def begin_backward(self) -> None:
        """Also wait for the copies of earlier backwards, here once per backward instead of once per parameter.

        The host gradient may be pageable, and a copy from pageable memory is staged before a stream could wait.
        """
        if self.cpu_offload:
            self._wait_for_offload_copies()
        super().begin_backward()

    @override
    def note_reduced(self, param_ids: set[int]) -> None:
        if not self.cpu_offload:
            return
        self.window.used |= param_ids
        groups = {self.grad_position[param_id][0] for param_id in param_ids}
        self.window.unpublished |= groups & self._flat_groups

    @override
    def add_to_host(self, run: Run) -> None:
        """Add a run of a bucket to its part of the host gradient, by way of the device; judge it at a boundary."""
        host, total = run.slice_of(self.host_gradient(run.group_idx)), run.values
        if run.begun:
            # Muon groups may accumulate wider than they reduce; everything else already has the sum's dtype.
            total = total.to(torch.promote_types(total.dtype, self.gradient_accumulation_dtype))
            total.add_(host.to(total.device, non_blocking=True))
        value = self.copy_to_host(total, host)
        self.window.on_host.update(run.param_ids)
        # DeepSpeed's name for "has been accumulated over several micro-batches"; no buffer of its own.
        if not self.is_gradient_accumulation_boundary():
            self.accumulated_grads_in_cpu.update(zip(run.param_ids, host.split(run.sizes), strict=True))
            for param_id in run.param_ids:  # judged at its request's end, or before the step
                self.norm_for_param_grads.pop(param_id, None)
        else:
            norms = gradient_norms(value.split(run.sizes))
            self.norm_for_param_grads.update(zip(run.param_ids, norms, strict=True))

    # --- a request's end --------------------------------------------------------------------------------------------

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        super().independent_gradient_partition_epilogue()
        if self.cpu_offload and self.is_gradient_accumulation_boundary():
            self._end_request_on_host()

    @override
    def _finalize_cpu_offload_gradient_accumulation(self) -> None:
        """Everything reduced is in the sum already; only the partitions are left to publish."""
        self._end_request_on_host()

    def _end_request_on_host(self) -> None:
        self.publish_window()
        self.settle_partitions()

    def publish_window(self) -> None:
        """Make the host gradient the window's sum, for every owned parameter; absent ones are zero."""
        self.publish_partitions()
        for param_id in self.grad_position.keys() - self.window.on_host:
            self._start_on_host(param_id)

    # --- what users read and write ----------------------------------------------------------------------------------

    @override
    def _get_offload_gradient_dict(self) -> None:
        for group_idx in self.group_indices:
            self.offload_gradient_dict[group_idx] = GradientFragments(self, group_idx)

    @override
    def update_offload_overflow_tracker(self, grad: torch.Tensor | None) -> None:
        """Called when a user has set a gradient: what was judged in backward no longer holds. Reads nothing."""
        self.window.edited = True
        self.window.unpublished.update(i for i in self.group_indices if self.resident_partition(i) is not None)

    def adopt_host_gradient(self, param: torch.Tensor) -> None:
        """Make the host gradient hold the open window's sum for ``param``: zero, if it has not taken part yet.

        What an earlier window left there is neither read as this one's nor mixed with what the user sets.
        """
        if not self.window.is_open or self.get_param_id(param) in self.window.on_host:
            return
        group_idx = self.grad_position[self.get_param_id(param)][0]
        whole = self._use_compact_grad_partition_buffer(group_idx)
        for each in self.params_in_partition[group_idx] if whole else [param]:
            self._start_on_host(self.get_param_id(each))

    def _start_on_host(self, param_id: int) -> None:
        """Begin a parameter's sum on the host, at zero; a partition that is built later starts from what is there."""
        self.owned_slice(self.param_dict[param_id]).zero_()
        self.window.on_host.add(param_id)
        self.window.published.add(self.grad_position[param_id][0])

    def judge_unjudged(self) -> None:
        """Before the step: norms of what no request end has judged, or a user has set, from the host gradient."""
        self.publish_window()
        self._wait_for_offload_copies()
        device = get_accelerator().current_device_name()
        if self.window.edited:
            self.window.partition_norms.clear()
            self.norm_for_param_grads.clear()
        for group_idx in self.group_indices:
            if group_idx in self.window.partition_norms:
                continue
            params = list(filter(self._is_unjudged, self.params_in_partition[group_idx]))
            if params:
                norms = torch.stack(gradient_norms([self.owned_slice(param) for param in params])).to(device)
                self.norm_for_param_grads.update(zip(map(self.get_param_id, params), norms.unbind(), strict=True))

    def _is_unjudged(self, param: torch.Tensor) -> bool:
        param_id = self.get_param_id(param)
        return (self.window.edited or param_id in self.window.used) and param_id not in self.norm_for_param_grads
