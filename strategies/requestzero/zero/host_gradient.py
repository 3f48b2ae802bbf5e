"""The flat gradients on the CPU that an offloaded optimizer reads: where they are, and how values get there."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator

from requestzero.zero.bucket_sum import BucketSum


class HostGradient(BucketSum):
    """Written for DeepSpeed 0.19.8, which copies every owned parameter on its own."""

    def host_gradient(self, group_idx: int) -> torch.Tensor:
        """The flat CPU gradient that the offloaded optimizer reads: ``partition_size`` elements, master dtype."""
        return self.single_partition_of_fp32_groups[group_idx].grad

    def owned_slice(self, param: torch.Tensor, partition: torch.Tensor | None = None) -> torch.Tensor:
        """What this rank owns of ``param``, as a view of ``partition`` (default: of the host gradient)."""
        group_idx, _, offset, numel = self.grad_position[self.get_param_id(param)]
        return (self.host_gradient(group_idx) if partition is None else partition).narrow(0, offset, numel)

    def copy_to_host(self, source: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
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
