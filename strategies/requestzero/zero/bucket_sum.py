"""From a bucket into the window's sum: all that this rank owns of it at once, not one parameter after another.

The sum is a flat fp32 partition (fp32 accumulation on a 16-bit model), else under CPU offload the host gradient, else a
tensor for every parameter on the device, whole where ranks share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup
from typing_extensions import override

from requestzero.zero.bucket_packing import BucketPacking
from requestzero.zero.bucket_runs import Piece, Run, runs_of
from requestzero.zero.partition_views import PartitionViews
from requestzero.zero.windowed import WindowedOptimizer

# Stands for "no output" where DeepSpeed would merge a slice without output with one that has an output, and lose it.
_NO_OUTPUT = torch.empty(0)


class BucketSum(BucketPacking):
    """Written for DeepSpeed 0.19.8, which slices, adds and copies every owned parameter on its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._taken: set[int] = set()
        """Parameters whose gradients were taken with others of their bucket, and that DeepSpeed will ask for."""
        self._arrived: dict[int, torch.Tensor] = {}
        """Gradients of this backward that are still to be added to a sum of their own."""
        super().__init__(*args, **kwargs)

    # --- what never changes, looked up for every parameter of every backward ----------------------------------------

    @cached_property
    def _flat_groups(self) -> frozenset[int]:
        """Groups whose sum is a flat fp32 partition."""
        return frozenset(filter(self._use_compact_grad_partition_buffer, self.group_indices))

    @cached_property
    def _partitioned_groups(self) -> frozenset[int]:
        """Groups whose sum is one tensor, a flat partition or the host gradient; others have one per parameter."""
        return frozenset(self.group_indices) if self.cpu_offload else self._flat_groups

    @cached_property
    def _reduces_in_place(self) -> bool:
        """Whether DeepSpeed would bring the reduced bucket to every rank as well (its default), with one reduction."""
        everywhere = self.reduce_scatter and self.use_multi_rank_bucket_allreduce
        return bool(everywhere and not self.overlap_comm and not self.has_moe_layers)

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
        if param_id not in self._taken:
            self._take_bucket(param)
        self._taken.remove(param_id)
        self.clear_grad_attribute(param)

    @torch.no_grad()  # a backward with create_graph=True brings gradients that have a graph, which ends here
    def _take_bucket(self, param: torch.Tensor) -> None:
        """Add everything that this rank owns of the bucket of ``param``."""
        comm_dtype = self.get_param_comm_dtype(param)
        bucket = self.ipg_buckets[comm_dtype]
        reduced = self._reduced(bucket, param)
        pieces = list(self._owned_pieces(bucket))
        for run in runs_of(reduced, pieces):
            if run.group_idx not in self._flat_groups:
                self.add_to_host(run)
            elif self._keeps_reduced_values(comm_dtype):
                self._add_to_partition(run)
        self._taken = {piece.param_id for piece in pieces}
        self.note_reduced(self._taken)
        self._taken |= self._take_out_of(bucket, reduced)

    def _reduced(self, bucket: Any, param: torch.Tensor) -> torch.Tensor:
        """The reduced gradients, flat; one that is larger than a bucket is alone and stays in its own memory."""
        if param.numel() > self.reduce_bucket_size:
            return self.get_param_gradient_attribute(param).detach().view(-1)
        return bucket.buffer[bucket.index].narrow(0, 0, bucket.elements)

    def _owned_pieces(self, bucket: Any) -> Iterator[Piece]:
        begin = 0
        for group_idx, param_idx, param_id in bucket.params:
            if group_idx in self._partitioned_groups and param_id in self._owned_places:
                _, start, offset, numel = self._owned_places[param_id]
                yield Piece(param_id, group_idx, offset, begin + start, numel, param_id in self.window.on_host)
            begin += self.bit16_groups[group_idx][param_idx].numel()

    def _take_out_of(self, bucket: Any, reduced: torch.Tensor) -> set[int]:
        """Copy the gradients of parameters that have a sum of their own, since the bucket is used again; their ids."""
        owned = [
            (position, self.param_dict[param_id])
            for position, (group_idx, _, param_id) in enumerate(bucket.params)
            if group_idx not in self._partitioned_groups and param_id in self._owned_places
        ]
        if owned:
            copies = [reduced]  # in memory of its own, if it is larger than a bucket
            if reduced.numel() <= self.reduce_bucket_size:
                parts = reduced.split([self.param_dict[param_id].numel() for _, _, param_id in bucket.params])
                flat = torch.cat([parts[position] for position, _ in owned])
                copies = list(flat.split([param.numel() for _, param in owned]))
            for (_, param), copy in zip(owned, copies, strict=True):
                self._arrived[self.get_param_id(param)] = copy.view(param.shape)
        return {self.get_param_id(param) for _, param in owned}

    @override
    def get_all_grad_tensors(self, tensor_list: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Also of gradients that were taken out of a bucket."""
        for param in tensor_list:
            gradient = self._arrived.pop(self.get_param_id(param), None)
            if gradient is not None:
                self._set_grad_attribute(param, gradient)
        return super().get_all_grad_tensors(tensor_list, dtype)

    def _set_grad_attribute(self, param: Any, gradient: torch.Tensor) -> None:
        if self.use_grad_accum_attribute:
            param.grad_accum = gradient
        else:
            param.grad = gradient

    def forget_bucket(self) -> None:
        """What was taken out of a bucket in a backward that was interrupted does not count."""
        self._taken.clear()
        self._arrived.clear()

    def _add_to_partition(self, run: Run) -> None:
        partition = self._get_compact_grad_partition_buffer(run.group_idx).flat_partition
        self._wait_for_partitions(get_accelerator().current_stream())
        run.slice_of(partition).add_(run.values)

    @override
    def _build_compact_grad_partition_buffer(self, group_idx: int) -> GradPartitionBufferGroup:
        """A partition of zeros; the views of its parameters are made on demand."""
        device = get_accelerator().current_device_name()
        zeros = torch.zeros(int(self.partition_size[group_idx]), dtype=self.gradient_accumulation_dtype, device=device)
        places = [self._owned_places[self.get_param_id(param)][2:] for param in self.params_in_partition[group_idx]]
        return PartitionViews(zeros, places)

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
        """In place where that gives the same; also wait for partitions that another stream has filled.

        DeepSpeed copies what goes to each rank out of the bucket, reduces the copy and copies it back.
        """
        if not tensor.numel():
            return  # a bucket that nothing is in; as in DeepSpeed, no collective
        stream = self.reduction_stream if self.overlap_comm else get_accelerator().current_stream()
        self._wait_for_partitions(stream)
        if not (self._reduces_in_place and self._keeps_reduced_values(communication_data_type)):
            super().average_tensor(tensor, communication_data_type)
            return
        for event in self.ipg_buckets[communication_data_type].ready_events.values():
            stream.wait_event(event)  # of hooks that have filled the bucket on other streams
        self._record_gradient_stream(tensor, stream)
        if self.gradient_average:
            tensor.div_(dist.get_world_size(group=self.dp_process_group))
        self.comm.all_reduce(tensor, group=self.dp_process_group)

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
