"""From a reduced bucket into the window's sum: all that this rank owns of it at once, not one parameter after another.

For groups whose sum is a flat fp32 partition (fp32 accumulation on a 16-bit model), and for all groups under CPU
offload. Other sums are tensors of their own on the device, and stay with DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from typing_extensions import override

from requestzero.optimizer.bucket_runs import Piece, Run, runs_of
from requestzero.optimizer.windowed import WindowedOptimizer


class BucketSum(WindowedOptimizer):
    """Written for DeepSpeed 0.19.8, which slices, adds and copies every owned parameter on its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._taken: set[int] = set()
        super().__init__(*args, **kwargs)

    @override
    def copy_grads_in_partition(self, param: torch.Tensor, group_idx: int | None = None) -> None:
        """Take reduced gradients into the window's sum: those of the whole bucket, with the first that is asked for."""
        param_id = self.get_param_id(param)
        if not self._takes_buckets(self._owned_places[param_id][0]):
            super().copy_grads_in_partition(param, group_idx)
            return
        if param_id not in self._taken:
            self._take_bucket(param)
        self._taken.remove(param_id)
        self.clear_grad_attribute(param)

    @cached_property
    def _owned_places(self) -> dict[int, tuple[int, int, int, int]]:
        """Id of an owned parameter -> its group, the first element owned, its place in the partition, how many."""
        places = {}
        for group_idx in self.group_indices:
            rank, size = dist.get_rank(group=self.real_dp_process_group[group_idx]), self.partition_size[group_idx]
            for param in self.params_in_partition[group_idx]:
                param_id = self.get_param_id(param)
                start = int(self.grad_start_offset[group_idx][rank][param_id])
                offset = int(self.grad_partition_insertion_offset[group_idx][rank][param_id])
                places[param_id] = group_idx, start, offset, min(param.numel() - start, int(size) - offset)
        return places

    def _takes_buckets(self, group_idx: int) -> bool:
        return self.cpu_offload or self._use_compact_grad_partition_buffer(group_idx)

    def _take_bucket(self, param: torch.Tensor) -> None:
        """Add everything that this rank owns of the bucket of ``param``."""
        bucket = self.ipg_buckets[self.get_param_comm_dtype(param)]
        pieces = list(self._owned_pieces(bucket))
        self._taken = {piece.param_id for piece in pieces}
        for run in runs_of(self._reduced(bucket, param), pieces):
            if not self._use_compact_grad_partition_buffer(run.group_idx):
                self.add_to_host(run)
            elif self._keeps_reduced_values(param):
                self._add_to_partition(run)
        self.note_reduced(self._taken)

    def _reduced(self, bucket: Any, param: torch.Tensor) -> torch.Tensor:
        """The reduced gradients, flat; one that is larger than a bucket is alone and stays in its own memory."""
        if param.numel() > self.reduce_bucket_size:
            return self.get_param_gradient_attribute(param).view(-1)
        return bucket.buffer[bucket.index].narrow(0, 0, bucket.elements)

    def _owned_pieces(self, bucket: Any) -> Iterator[Piece]:
        begin = 0
        for group_idx, param_idx, param_id in bucket.params:
            if self.is_param_in_current_partition[param_id] and self._takes_buckets(group_idx):
                _, start, offset, numel = self._owned_places[param_id]
                yield Piece(param_id, group_idx, offset, begin + start, numel, param_id in self.window.on_host)
            begin += self.bit16_groups[group_idx][param_idx].numel()

    # --- stage 1: a bucket is filled by one copy --------------------------------------------------------------------

    @property
    def _packs_buckets(self) -> bool:
        """Whether reduction begins when all gradients are there, and nothing but the bucket is read after it."""
        at_the_end = not self.partition_gradients and not self.overlap_comm and self.contiguous_gradients
        return at_the_end and not self.has_moe_layers and all(map(self._takes_buckets, self.group_indices))

    @override
    def reduce_independent_p_g_buckets_and_remove_grads(self, param: torch.Tensor, i: int) -> None:
        """Stage 1 only notes what goes into the bucket; DeepSpeed copies every gradient on its own."""
        own_bucket = param.numel() > self.reduce_bucket_size
        if own_bucket or not self._packs_buckets or not getattr(param, "ds_grad_is_ready", True):
            super().reduce_independent_p_g_buckets_and_remove_grads(param, i)
        elif param.numel() > 0:
            comm_dtype = self.get_param_comm_dtype(param)
            bucket = self.ipg_buckets[comm_dtype]
            if bucket.elements + param.numel() > self.reduce_bucket_size:
                self.reduce_ipg_grads(comm_dtype)
            bucket.grads.append(self.get_gradient_for_reduction(param))
            bucket.params.append((i, param.param_idx_in_group, self.get_param_id(param)))
            bucket.elements += param.numel()

    @override
    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        """Also fill the buckets whose gradients have only been noted, and let go of the gradients."""
        if self._packs_buckets:
            for dtype, bucket in self.ipg_buckets.items():
                if bucket.params and dtype not in self.extra_large_param_to_reduce and comm_dtype in (None, dtype):
                    self._pack(bucket)
        super().reduce_ipg_grads(comm_dtype)

    def _pack(self, bucket: Any) -> None:
        flat = [gradient.reshape(-1) for gradient in bucket.grads]
        torch.cat(flat, out=bucket.buffer[bucket.index].narrow(0, 0, bucket.elements))
        bucket.grads.clear()
        for _, _, param_id in bucket.params:
            self.clear_grad_attribute(self.param_dict[param_id])

    # --- flat partitions --------------------------------------------------------------------------------------------

    def _add_to_partition(self, run: Run) -> None:
        partition = self._get_compact_grad_partition_buffer(run.group_idx).flat_partition
        self.wait_for_partitions(get_accelerator().current_stream())
        run.slice_of(partition).add_(run.values)

    def _keeps_reduced_values(self, param: torch.Tensor) -> bool:
        """Whether the bucket holds what the reduction gave, in the same dtype: else only the reduction itself can add it.

        A sum that is reduced in fp32 would be rounded to a 16-bit bucket; Ulysses reduces in fp32 whatever is set.
        """
        same = self.get_param_comm_dtype(param) == self._gradient_reduction_buffer_dtype()
        return self.contiguous_gradients and same and self.sequence_parallel_size == 1

    @override
    def _get_compact_grad_partition_slice(
        self, group_idx: int, partition_id: int, param_id: int, num_elements: int
    ) -> torch.Tensor | None:
        """None where the bucket is taken whole, which lets DeepSpeed reduce neighbours as one slice."""
        if self._keeps_reduced_values(self.param_dict[param_id]):
            return None
        return super()._get_compact_grad_partition_slice(group_idx, partition_id, param_id, num_elements)

    @override
    def average_tensor(self, tensor: torch.Tensor, communication_data_type: torch.dtype) -> None:
        """Also wait for partitions that another stream has filled (zeros or restored values) before adding to them."""
        self.wait_for_partitions(self.reduction_stream if self.overlap_comm else get_accelerator().current_stream())
        super().average_tensor(tensor, communication_data_type)

    def wait_for_partitions(self, stream: Any) -> None:
        """Let ``stream`` go on only when the partitions have been filled."""
        for event in self.window.partition_ready.values():
            stream.wait_event(event)

    # --- of the class that keeps sums on the host -------------------------------------------------------------------

    def note_reduced(self, param_ids: set[int]) -> None:
        """Called when gradients of these parameters have come into the sum."""

    def add_to_host(self, run: Run) -> None:
        """Add a run to the host gradient (CPU offload without a flat partition)."""
        raise NotImplementedError
