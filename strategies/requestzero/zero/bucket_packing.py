"""Into a bucket: at stage 1, where reduction begins when all gradients are there, a bucket is filled by one copy."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from typing_extensions import override

from requestzero.zero.windowed import WindowedOptimizer


class BucketPacking(WindowedOptimizer):
    """Written for DeepSpeed 0.19.8, which copies gradients into a bucket one by one."""

    @cached_property
    def _packs_buckets(self) -> bool:
        """Whether all gradients are there before the first is reduced, and nothing but the bucket is read after it."""
        at_the_end = not self.partition_gradients and not self.overlap_comm and self.contiguous_gradients
        return at_the_end and not self.has_moe_layers

    @override
    def _fill_param_grad_accum_attribute(self, param: Any) -> None:
        """A micro-batch's gradient is widened when another is added to it; the bucket takes a lone one as it is."""
        gradient = param.grad
        if gradient is None or not self._packs_buckets or param.numel() > self.reduce_bucket_size:
            super()._fill_param_grad_accum_attribute(param)
            return
        total = param.grad_accum
        param.grad_accum = gradient if total is None else total.to(self.gradient_accumulation_dtype).add_(gradient)
        param.grad = None

    @override
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Also fill the buckets first: DeepSpeed, which copies gradients one by one, finds nothing left to copy."""
        if self._packs_buckets and self.ready_for_gradients:
            for group_idx, group in enumerate(self.bit16_groups):
                for param in group:
                    self._note_gradient(param, group_idx)
            for bucket in self.ipg_buckets.values():
                self._pack(bucket)
        super().reduce_gradients(pipeline_parallel)

    def _note_gradient(self, param: Any, group_idx: int) -> None:
        """Put a gradient on the list of its bucket, which is reduced before if it is full."""
        gradient, size = self.get_gradient_for_reduction(param), param.numel()
        if gradient is None or size == 0 or not getattr(param, "ds_grad_is_ready", True):
            return
        comm_dtype = self.get_param_comm_dtype(param)
        bucket = self.ipg_buckets[comm_dtype]
        if size > self.reduce_bucket_size:
            self._pack(bucket)
            self._reduce_alone(param, group_idx)
            return
        self.arriving = param
        if self.records_origin:
            self.record_origin(param)
        if bucket.elements + size > self.reduce_bucket_size:
            self._pack(bucket)
            self.reduce_ipg_grads(comm_dtype)
        bucket.grads.append(gradient)
        bucket.params.append((group_idx, param.param_idx_in_group, self.get_param_id(param)))
        bucket.elements += size

    def _reduce_alone(self, param: Any, group_idx: int) -> None:
        """Reduce a gradient that is larger than a bucket in its own memory, after what has come before it."""
        self.reduce_ready_partitions_and_remove_grads(param, group_idx)
        self.arriving = None
        self.reduce_ipg_grads(self.get_param_comm_dtype(param))
        self.clear_grad_attribute(param)

    @torch.no_grad()  # a backward with create_graph=True brings gradients that have a graph, and it ends here
    def _pack(self, bucket: Any) -> None:
        """Copy the gradients on the bucket's list into it, in its dtype, and let go of them."""
        if not bucket.grads:
            return
        stream = get_accelerator().current_stream()
        for gradient in bucket.grads:
            # It may be of another stream's memory, where a backward hook has run.
            self._record_gradient_stream(gradient, stream)
        flat = [gradient.reshape(-1) for gradient in bucket.grads]
        room = bucket.buffer[bucket.index].narrow(0, 0, bucket.elements)
        dtypes = {gradient.dtype for gradient in flat}
        if dtypes == {room.dtype} or len(dtypes) > 1:
            torch.cat(flat, out=room)
        else:  # several times faster than a concatenation that converts
            room.copy_(torch.cat(flat))
        bucket.grads.clear()
        for _, _, param_id in bucket.params:
            self.clear_grad_attribute(self.param_dict[param_id])
