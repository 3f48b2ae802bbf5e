"""The window's running sum under CPU offload: the host gradient is the sum, the device partition a cache of it.

Two kinds of parameter groups:

- With fp32 accumulation on a 16-bit model the sum is built in a flat fp32 partition on the device. At a request end it
  is *published* (copied to the host gradient, once per group) and, where the host gradient holds it bit for bit,
  *released*; the next backward that reduces into the group *restores* it.
- Otherwise there is no partition-sized buffer on the device: what a reduced bucket brings is added to the slices of the
  host gradient that belong to it, by way of the device.

No auxiliary host buffer exists in either.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup
from typing_extensions import override

from requestzero.optimizer.bucket_runs import Run
from requestzero.optimizer.bucket_sum import BucketSum
from requestzero.optimizer.grad_norm import gradient_norms, partition_norm


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
        if partition is None:
            # A copy that is still under way would be missed by a read, and would overwrite a write.
            self._optimizer._wait_for_offload_copies()
            self._optimizer.adopt_host_gradient(param)
        return self._optimizer.owned_slice(param, partition)

    def clear(self) -> None:
        """Nothing is held here (called when states are offloaded)."""


class HostSum(BucketSum):
    """Written for DeepSpeed 0.19.8.

    Replaces its per-parameter boundary copies, host accumulators and host reads. Can go when DeepSpeed keeps the sum of
    several requests under CPU offload and records participation per parameter.
    """

    def __init__(self, *args: Any, retain_gpu_grad_partition_until_step: bool = False, **kwargs: Any) -> None:
        self.retain_gpu_grad_partition_until_step = retain_gpu_grad_partition_until_step
        super().__init__(*args, **kwargs)

    def host_gradient(self, group_idx: int) -> torch.Tensor:
        """The flat CPU gradient that the offloaded optimizer reads: ``partition_size`` elements, master dtype."""
        return self.single_partition_of_fp32_groups[group_idx].grad

    def owned_slice(self, param: torch.Tensor, partition: torch.Tensor | None = None) -> torch.Tensor:
        """What this rank owns of ``param``, as a view of ``partition`` (default: of the host gradient)."""
        group_idx, _, offset, numel = self.grad_position[self.get_param_id(param)]
        return (self.host_gradient(group_idx) if partition is None else partition).narrow(0, offset, numel)

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
        value = self._copy_to_host(total, host)
        self.window.on_host.update(run.param_ids)
        # DeepSpeed's name for "has been accumulated over several micro-batches"; no buffer of its own.
        if not self.is_gradient_accumulation_boundary():
            self.accumulated_grads_in_cpu.update(zip(run.param_ids, host.split(run.sizes), strict=True))
            for param_id in run.param_ids:  # judged at its request's end, or before the step
                self.norm_for_param_grads.pop(param_id, None)
        else:
            norms = gradient_norms(value.split(run.sizes))
            self.norm_for_param_grads.update(zip(run.param_ids, norms, strict=True))

    def _copy_to_host(self, source: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        """Copy to the host gradient without waiting; returns the value on the device as the host now holds it."""
        exact = torch.promote_types(source.dtype, host.dtype) == host.dtype
        if source.dtype != host.dtype and not (exact and source.device == host.device):
            # Between devices a converting copy would go through a pageable buffer and wait. A narrowing one rounds, and
            # may overflow: what is judged has to be what the host gets.
            source = source.to(host.dtype)
        host.copy_(source, non_blocking=True)
        self._record_gradient_stream(source, get_accelerator().current_stream())
        self._record_offload_copy()
        return source

    # --- the device partition: publish, release, restore ------------------------------------------------------------

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        super().independent_gradient_partition_epilogue()
        if self.cpu_offload and self.is_gradient_accumulation_boundary():
            self.publish_window()

    @override
    def _finalize_cpu_offload_gradient_accumulation(self) -> None:
        """Everything reduced is in the sum already; only the partitions are left to publish."""
        self.publish_window()

    def publish_window(self) -> None:
        """Make the host gradient the window's sum, for every owned parameter; absent ones are zero."""
        for group_idx in sorted(self.window.unpublished):
            self._publish(group_idx)
        self.window.unpublished.clear()
        for param_id in self.grad_position.keys() - self.window.on_host:
            self._start_on_host(param_id)

    def _publish(self, group_idx: int) -> None:
        partition, host = self.resident_partition(group_idx), self.host_gradient(group_idx)
        assert partition is not None
        value = self._copy_to_host(partition, host)
        if self._counts_whole(group_idx):
            self.window.partition_norms[group_idx] = partition_norm(value)
        else:
            params = self.params_in_partition[group_idx]
            norms = gradient_norms([self.owned_slice(param, value) for param in params])
            self.norm_for_param_grads.update(zip(map(self.get_param_id, params), norms, strict=True))
        self.window.published.add(group_idx)
        self.window.on_host.update(map(self.get_param_id, self.params_in_partition[group_idx]))
        if not self.retain_gpu_grad_partition_until_step and host.dtype == partition.dtype:
            self.averaged_gradients[group_idx] = None

    @override
    def _build_compact_grad_partition_buffer(self, group_idx: int) -> Any:
        """Also restore a released partition: the window's sum goes on from what was published.

        Without DeepSpeed's view of every parameter in it, which only its step on the device asks for.
        """
        if self.cpu_offload:
            group = self._filled_partition(group_idx)
        else:
            group = super()._build_compact_grad_partition_buffer(group_idx)
        if not get_accelerator().resolves_data_dependency():
            event = get_accelerator().Event()
            event.record(get_accelerator().current_stream())
            self.window.partition_ready[group_idx] = event
        return group

    def _filled_partition(self, group_idx: int) -> GradPartitionBufferGroup:
        host, device = self.host_gradient(group_idx), get_accelerator().current_device_name()
        if group_idx in self.window.published:
            flat = torch.empty(host.numel(), dtype=self.gradient_accumulation_dtype, device=device)
            flat.copy_(host, non_blocking=True)
        else:
            flat = torch.zeros(host.numel(), dtype=self.gradient_accumulation_dtype, device=device)
        return GradPartitionBufferGroup([flat], flat)

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
