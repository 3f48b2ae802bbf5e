"""The window's running sum on the device: it survives request ends.

DeepSpeed keeps the sum of a request's micro-batches in ``all_grad_tensors`` (or, for fp32 accumulation on a 16-bit
model, in a flat ``averaged_gradients`` partition, which lives until the step as it is) and drops the former at every
gradient accumulation boundary, so that a second request replaces the first one. Here the tensors stay: what a boundary
hands to the step are views of them, not copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from typing_extensions import override

from requestzero.zero.windowed import WindowedOptimizer


def _padding(like: torch.Tensor, numel: int) -> torch.Tensor:
    """Zeros that DeepSpeed takes for no parameter's."""
    zeros = like.new_zeros(numel)
    zeros._zero_padding = True  # type: ignore[attr-defined]
    return zeros


class DeviceSum(WindowedOptimizer):
    """Written for DeepSpeed 0.19.8. Can go when a boundary no longer clears ``all_grad_tensors``."""

    @override
    def get_flat_partition(
        self, tensor_list: list[torch.Tensor], *args: Any, param_group_idx: int, **kwargs: Any
    ) -> Any:
        """Also note the tensors, since the caller forgets them; a Muon group gives its plain sum until the step."""
        self.window.device_sums[param_group_idx] = self.all_grad_tensors[param_group_idx]
        if self.is_muon_group(param_group_idx):
            return self._owned_views(param_group_idx)
        kwargs["param_group_idx"] = param_group_idx
        return super().get_flat_partition(tensor_list, *args, **kwargs)

    def _owned_views(self, group_idx: int) -> list[torch.Tensor]:
        """The owned slice of every sum of the group, then the padding: together ``partition_size`` elements.

        DeepSpeed applies Muon here, at every boundary. It folds the gradient into the momentum and overwrites it, so
        over a window it has to happen once, on the whole sum.
        """
        rank = dist.get_rank(group=self.real_dp_process_group[group_idx])
        size, filled = int(self.partition_size[group_idx]), 0
        views: list[torch.Tensor] = []
        for param, total in zip(self.params_in_partition[group_idx], self.window.device_sums[group_idx], strict=True):
            param_id = self.get_param_id(param)
            start = int(self.grad_start_offset[group_idx][rank][param_id])
            offset = int(self.grad_partition_insertion_offset[group_idx][rank][param_id])
            if offset > filled:
                views.append(_padding(total, offset - filled))
            views.append(total.view(-1).narrow(0, start, min(param.numel() - start, size - offset)))
            filled = offset + views[-1].numel()
        return [*views, _padding(views[0], size - filled)]

    def apply_muon_to_sums(self) -> None:
        """Turn the sums of Muon groups into Muon updates, once, at step time; the sums are divided first.

        The division (loss scale and divisor) must come before the momentum sees the gradient. DeepSpeed's ``step``
        multiplies the update by ``loss_scale`` again, since Newton-Schulz loses the scale.
        """
        for group_idx in self.group_indices:
            if self.cpu_offload or not self.is_muon_group(group_idx):
                continue
            sums = self.window.device_sums[group_idx]
            self.all_grad_tensors[group_idx] = [total / self.loss_scale for total in sums]
            self.averaged_gradients[group_idx] = self._partition_of_sums(super().get_flat_partition, group_idx)

    @override
    def get_all_grad_tensors(self, tensor_list: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Contiguous, so that the views handed to the step stay views (a gradient set by the user reaches the sum)."""
        return [grad.contiguous() for grad in super().get_all_grad_tensors(tensor_list, dtype)]

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """Also put the sums back that a boundary dropped, and close the micro-batch.

        ``grad_accum`` is cleared here and not at the next forward: the partition holds its value from now on, and a
        second backward of the same forward must not add it again.
        """
        super().independent_gradient_partition_epilogue()
        self.all_grad_tensors.update(self.window.device_sums)
        if self.use_grad_accum_attribute:
            for group in self.bit16_groups:
                for param in group:
                    param.grad_accum = None
        self.note_peak_bytes()
        if self.is_gradient_accumulation_boundary():
            self.window.end_request()

    @override
    def clear_backward_seen_flag(self) -> None:
        """Without dropping ``grad_accum``: what an epilogue has reduced is cleared there, the rest is still to come."""
        self._epilogue_ran_this_backward = False
        super().clear_backward_seen_flag()

    @override
    def finalize_gradient_accumulation_boundary(self) -> None:
        """Also harmless when nothing has come since the last request end."""
        if not self.window.request_open:
            return
        super().finalize_gradient_accumulation_boundary()
        self.all_grad_tensors.update(self.window.device_sums)
        self.window.end_request()

    @override
    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Also move the sums that parameters split between ranks keep behind the views of them."""
        super().offload_states(*args, **kwargs)
        if OffloadStateTypeEnum.lp_grads in self.offloaded_states:
            self._move_sums("cpu")

    @override
    def reload_states(self, non_blocking: bool = False) -> None:
        """Also make what the step reads views of the sums again, which moving has made copies of."""
        moved = OffloadStateTypeEnum.lp_grads in self.offloaded_states
        super().reload_states(non_blocking)
        if moved:
            self._move_sums(get_accelerator().current_device_name())
            for group_idx in self.window.device_sums:
                if self.averaged_gradients.get(group_idx) is not None:
                    self.averaged_gradients[group_idx] = self._partition_of_sums(self.get_flat_partition, group_idx)

    def _move_sums(self, device: str) -> None:
        for sums in self.window.device_sums.values():
            for total in sums:
                total.data = total.data.to(device)

    def _partition_of_sums(self, flatten: Callable[..., Any], group_idx: int) -> Any:
        """What ``flatten``, a version of ``get_flat_partition``, makes of the group's ``all_grad_tensors``."""
        return flatten(
            self.params_in_partition[group_idx],
            self.first_offset[group_idx],
            self.partition_size[group_idx],
            dtype=self.gradient_accumulation_dtype,
            device=get_accelerator().current_device_name(),
            param_group_idx=group_idx,
            return_tensor_list=True,
        )

    @override
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Also reduce what no hook of this backward has brought (ZeRO-1 with ``overlap_comm``).

        There only hooks feed the buckets, so a parameter that contributed earlier in the request and is absent from
        its last backward would be left out. Without ``overlap_comm`` and ``contiguous_gradients`` there are no hooks,
        so that a request's reduction begins here.
        """
        self.setup_buckets()
        if self.overlap_comm:
            in_bucket = {param_id for bucket in self.ipg_buckets.values() for _, _, param_id in bucket.params}
            for group_idx, group in enumerate(self.bit16_groups):
                for param in group:
                    param_id = self.get_param_id(param)
                    brought = self.params_already_reduced[param_id] or param_id in in_bucket
                    if not brought and self.get_gradient_for_reduction(param) is not None:
                        self.reduce_ready_partitions_and_remove_grads(param, group_idx)
        super().reduce_gradients(pipeline_parallel)
