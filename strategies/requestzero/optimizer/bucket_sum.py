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

# Stands for "no output" where DeepSpeed would merge a slice without output with one that has an output, and lose it.
_NO_OUTPUT = torch.empty(0)


class BucketSum(WindowedOptimizer):
    """Written for DeepSpeed 0.19.8, which slices, adds and copies every owned parameter on its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._taken: set[int] = set()
        super().__init__(*args, **kwargs)

    # --- what never changes, looked up for every parameter of every backward ----------------------------------------

    @cached_property
    def _flat_groups(self) -> frozenset[int]:
        """Groups whose sum is a flat fp32 partition."""
        return frozenset(filter(self._use_compact_grad_partition_buffer, self.group_indices))

    @cached_property
    def _taken_groups(self) -> frozenset[int]:
        """Groups whose gradients are taken from the bucket here."""
        return frozenset(self.group_indices) if self.cpu_offload else self._flat_groups

    @cached_property
    def _packs_buckets(self) -> bool:
        """Whether reduction begins when all gradients are there, and nothing but the bucket is read after it."""
        at_the_end = not self.partition_gradients and not self.overlap_comm and self.contiguous_gradients
        return at_the_end and not self.has_moe_layers and len(self._taken_groups) == len(self.group_indices)

    @cached_property
    def _owned_places(self) -> dict[int, tuple[int, int, int, int]]:
        """Id of an owned parameter -> its group, the first element owned, its place in the partition, how many."""
        places = {}
        for group_idx in self.group_indices:
            rank, size = dist.get_rank(group=self.real_dp_process_group[group_idx]), int(self.partition_size[group_idx])
            for param in self.params_in_partition[group_idx]:
                param_id = self.get_param_id(param)
                start = int(self.grad_start_offset[group_idx][rank][param_id])
                offset = int(self.grad_partition_insertion_offset[group_idx][rank][param_id])
                places[param_id] = group_idx, start, offset, min(param.numel() - start, size - offset)
        return places

    def _keeps_reduced_values(self, comm_dtype: torch.dtype) -> bool:
        """Whether the bucket holds what the reduction gave, in the same dtype; else only the reduction can add it.

        A sum that is reduced in fp32 would be rounded to a 16-bit bucket; Ulysses reduces in fp32 whatever is set.
        """
        same = comm_dtype == self._gradient_reduction_buffer_dtype()
        return same and self.contiguous_gradients and self.sequence_parallel_size == 1

    # --- after the reduction ----------------------------------------------------------------------------------------

    @override
    def copy_grads_in_partition(self, param: torch.Tensor, group_idx: int | None = None) -> None:
        """Take reduced gradients into the window's sum: those of the whole bucket with the first that is asked for."""
        param_id = self.get_param_id(param)
        if not self._taken_groups or self._owned_places[param_id][0] not in self._taken_groups:
            super().copy_grads_in_partition(param, group_idx)
            return
        if param_id not in self._taken:
            self._take_bucket(param)
        self._taken.remove(param_id)
        self.clear_grad_attribute(param)

    def _take_bucket(self, param: torch.Tensor) -> None:
        """Add everything that this rank owns of the bucket of ``param``."""
        comm_dtype = self.get_param_comm_dtype(param)
        bucket = self.ipg_buckets[comm_dtype]
        pieces = list(self._owned_pieces(bucket))
        self._taken = {piece.param_id for piece in pieces}
        for run in runs_of(self._reduced(bucket, param), pieces):
            if run.group_idx not in self._flat_groups:
                self.add_to_host(run)
            elif self._keeps_reduced_values(comm_dtype):
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
            if group_idx in self._taken_groups and param_id in self._owned_places:
                _, start, offset, numel = self._owned_places[param_id]
                yield Piece(param_id, group_idx, offset, begin + start, numel, param_id in self.window.on_host)
            begin += self.bit16_groups[group_idx][param_idx].numel()

    def _add_to_partition(self, run: Run) -> None:
        partition = self._get_compact_grad_partition_buffer(run.group_idx).flat_partition
        self._wait_for_partitions(get_accelerator().current_stream())
        run.slice_of(partition).add_(run.values)

    def _wait_for_partitions(self, stream: Any) -> None:
        """Let ``stream`` add to partitions only when they have been filled, with zeros or restored values."""
        for event in self.window.partition_ready.values():
            stream.wait_event(event)

    def note_reduced(self, param_ids: set[int]) -> None:
        """Called when gradients of these parameters have come into the sum."""

    def add_to_host(self, run: Run) -> None:
        """Add a run to the host gradient (CPU offload without a flat partition)."""
        raise NotImplementedError

    # --- the reduction ----------------------------------------------------------------------------------------------

    @override
    def average_tensor(self, tensor: torch.Tensor, communication_data_type: torch.dtype) -> None:
        """In place where the bucket is packed; also wait for partitions that another stream has filled.

        DeepSpeed copies what goes to each rank out of the bucket, reduces the copy and copies it back.
        """
        if not tensor.numel():
            return  # a bucket that nothing is in; as in DeepSpeed, no collective
        self._wait_for_partitions(self.reduction_stream if self.overlap_comm else get_accelerator().current_stream())
        if not (self._packs_buckets and self._keeps_reduced_values(communication_data_type) and self._all_reduces):
            super().average_tensor(tensor, communication_data_type)
            return
        if self.gradient_average:
            tensor.div_(dist.get_world_size(group=self.dp_process_group))
        self.comm.all_reduce(tensor, group=self.dp_process_group)

    @property
    def _all_reduces(self) -> bool:
        """Whether DeepSpeed would bring the reduced bucket to every rank as well (its default)."""
        return bool(self.reduce_scatter and self.use_multi_rank_bucket_allreduce)

    @override
    def _get_compact_grad_partition_slice(
        self, group_idx: int, partition_id: int, param_id: int, num_elements: int
    ) -> torch.Tensor | None:
        """None where buckets are taken whole, which lets DeepSpeed reduce neighbours as one slice.

        Else only flat partitions have an output. DeepSpeed merges a slice without one (a Muon group's) with a slice
        before it that has one, whose gradient then is in no sum: a stand-in keeps them apart.
        """
        if not self._flat_groups or self._keeps_reduced_values(self.get_param_comm_dtype(self.param_dict[param_id])):
            return None
        if group_idx not in self._flat_groups:
            return _NO_OUTPUT
        return super()._get_compact_grad_partition_slice(group_idx, partition_id, param_id, num_elements)

    @staticmethod
    @override
    def _add_to_grad_partition_buffer(output: torch.Tensor | None, source: torch.Tensor) -> None:
        if output is not _NO_OUTPUT:
            WindowedOptimizer._add_to_grad_partition_buffer(output, source)

    # --- stage 1: a bucket is filled by one copy --------------------------------------------------------------------

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
        if gradient is None or size > self.reduce_bucket_size or not getattr(param, "ds_grad_is_ready", True):
            return
        self.look_at_gradient(param)
        comm_dtype = self.get_param_comm_dtype(param)
        bucket = self.ipg_buckets[comm_dtype]
        if bucket.elements + size > self.reduce_bucket_size:
            self._pack(bucket)
            self.reduce_ipg_grads(comm_dtype)
        if size > 0:
            # It may be of another stream's memory, where a backward hook has run, and is let go of before it is copied.
            self._record_gradient_stream(gradient, get_accelerator().current_stream())
            bucket.grads.append(gradient)
            bucket.params.append((group_idx, param.param_idx_in_group, self.get_param_id(param)))
            bucket.elements += size

    def _pack(self, bucket: Any) -> None:
        """Copy the gradients on the bucket's list into it, and let go of them."""
        if bucket.grads:
            flat = [gradient.reshape(-1) for gradient in bucket.grads]
            torch.cat(flat, out=bucket.buffer[bucket.index].narrow(0, 0, bucket.elements))
            bucket.grads.clear()
            for _, _, param_id in bucket.params:
                self.clear_grad_attribute(self.param_dict[param_id])
