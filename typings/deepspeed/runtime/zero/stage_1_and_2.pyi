from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ..base_optimizer import ZeROOptimizer
from .offload_config import DeepSpeedZeroOffloadOptimizerConfig, OffloadDeviceEnum, OffloadStateTypeEnum

# Every collective of this module is looked up in it.
dist: ModuleType

@dataclass
class IPGBucket:
    """A bucket being filled, on the stream of each hook that fills it."""

    buffer: list[torch.Tensor]
    params: list[Any]
    grads: list[torch.Tensor]
    elements: int
    index: int
    ready_events: dict[Any, Any]

    def clear(self) -> None: ...

class GradPartitionBufferGroup(list[torch.Tensor]):
    """The views of a flat partition, in the order of its parameters, padding included."""

    flat_partition: torch.Tensor

    def __init__(self, grad_buffers: Sequence[torch.Tensor], flat_partition: torch.Tensor) -> None: ...
    def move_flat_partition(self, device: Any, non_blocking: bool = False) -> None: ...

class DeepSpeedZeroOptimizer(ZeROOptimizer):
    def __init__(
        self,
        init_optimizer: Optimizer,
        param_names: dict[torch.Tensor, str],
        timers: Any,
        optimizer_params: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
        contiguous_gradients: bool = True,
        reduce_bucket_size: int = 500000000,
        use_multi_rank_bucket_allreduce: bool = True,
        allgather_bucket_size: int = 5000000000,
        dp_process_group: ProcessGroup | None = None,
        expert_parallel_group: Any = None,
        expert_data_parallel_group: Any = None,
        reduce_scatter: bool = True,
        overlap_comm: bool = False,
        offload_optimizer_config: DeepSpeedZeroOffloadOptimizerConfig | None = None,
        zenflow_config: Any = None,
        mpu: Any = None,
        clip_grad: float = 0.0,
        gradient_accumulation_dtype: torch.dtype = ...,
        communication_data_type: torch.dtype = ...,
        postscale_gradients: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average: bool = True,
        gradient_accumulation_steps: int = 1,
        ignore_unused_parameters: bool = True,
        partition_grads: bool = True,
        round_robin_gradients: bool = False,
        parameter_alignment: bool = False,
        has_moe_layers: bool = False,
        fp16_master_weights_and_gradients: bool = False,
        bf16_master_weights_and_gradients: bool = False,
        bf16_optimizer_states: bool = False,
        elastic_checkpoint: bool = False,
        check_grad_overflow: bool = True,
        compute_grad_norm: bool = True,
    ) -> None:
        """Calls methods that are overridden, before an ``__init__`` that comes after it."""
    def initialize_optimizer_states(self) -> None:
        """Allocates the host gradients under offload, pinned where that is configured."""
    def _link_all_hp_params(self) -> None: ...

    # Configuration.
    cpu_offload: bool
    partition_gradients: bool
    reduce_scatter: bool
    overlap_comm: bool
    contiguous_gradients: bool
    use_multi_rank_bucket_allreduce: bool
    use_grad_accum_attribute: bool
    reduce_bucket_size: int
    gradient_average: bool
    ignore_unused_parameters: bool
    check_grad_overflow: bool
    compute_grad_norm: bool
    clip_grad: float
    has_moe_layers: bool
    dtype: torch.dtype
    gradient_accumulation_dtype: torch.dtype
    device: Any
    dp_process_group: ProcessGroup
    real_dp_process_group: list[ProcessGroup]
    sequence_parallel_size: int
    model_parallel_rank: int

    # Parameters. Those in groups have attributes of DeepSpeed's, such as grad_accum, hence Any.
    param_names: dict[torch.Tensor, str]
    param_dict: dict[int, Any]
    bit16_groups: list[list[Any]]
    bit16_groups_flat: list[torch.Tensor]
    round_robin_bit16_groups: list[list[Any]]
    round_robin_bit16_meta: list[list[torch.Tensor]]
    round_robin_bit16_offsets: list[list[int]]
    single_partition_of_fp32_groups: list[torch.Tensor]
    params_in_partition: list[list[Any]]
    partition_size: list[int]
    first_offset: list[int]
    grad_start_offset: dict[int, dict[int, dict[int, int]]]
    grad_partition_insertion_offset: dict[int, dict[int, dict[int, int]]]
    grad_position: dict[int, list[int]]

    def get_param_id(self, param: torch.Tensor) -> int:
        """Numbers the parameters of all groups in their order."""
    def get_grad_position(
        self, group_id: int, tensor_list: list[torch.Tensor], first_offset: int, partition_size: int
    ) -> None:
        """Makes ``grad_position``: group, place and size of every owned parameter in the host gradient."""
    def _update_model_bit16_weights(self, group_index: int) -> None: ...

    # A gradient, from its hook into a bucket.
    ready_for_gradients: bool
    params_already_reduced: list[bool]
    ipg_buckets: dict[torch.dtype, IPGBucket]
    extra_large_param_to_reduce: dict[Any, torch.Tensor]
    previous_reduced_grads: dict[Any, list[torch.Tensor]]

    def clear_backward_seen_flag(self) -> None: ...
    def process_gradients(self, param: torch.Tensor, i: int) -> None:
        """Called by every gradient's hook; makes the buckets ready first."""
    def setup_buckets(self) -> None: ...
    def _fill_param_grad_accum_attribute(self, param: torch.Tensor) -> None: ...
    def get_gradient_for_reduction(self, param: torch.Tensor) -> torch.Tensor | None:
        """Reads ``grad_accum`` or ``grad``, as ``use_grad_accum_attribute`` says; none on a parameter without one."""
    def get_param_gradient_attribute(self, param: torch.Tensor) -> torch.Tensor:
        """The same attribute."""
    def clear_grad_attribute(self, param: torch.Tensor) -> None:
        """Clears the same attribute."""
    def reduce_ready_partitions_and_remove_grads(self, param: torch.Tensor, i: int) -> None: ...
    def reduce_independent_p_g_buckets_and_remove_grads(self, param: torch.Tensor, i: int) -> None: ...
    def _record_gradient_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Under offload, keeps a tensor's memory from being given out before ``stream`` is done with it."""
    def _release_ipg_buffers(self) -> None:
        """Frees the buckets' memory, and says that buckets are to be made ready again."""

    # A bucket's reduction.
    reduction_stream: Any

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None: ...
    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None: ...
    def average_tensor(self, tensor: torch.Tensor, communication_data_type: torch.dtype) -> None: ...
    def gradient_reduction_w_predivide(
        self, tensor: torch.Tensor, communication_data_type: torch.dtype
    ) -> torch.Tensor:
        """Reduces a whole bucket, where ranks are not reduced to one by one."""
    def allreduce_and_scatter(
        self,
        bucket: list[torch.Tensor],
        communication_data_type: torch.dtype,
        numel_per_bucket: int = 500000000,
        log: Any = None,
        divide: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        """Reduces to every rank and copies back into the bucket; with the same result as one reduction in place."""
    def allreduce_no_retain(
        self,
        bucket: list[torch.Tensor],
        communication_data_type: torch.dtype,
        numel_per_bucket: int = 500000000,
        rank: int | None = None,
        log: Any = None,
        divide: bool = True,
        process_group: ProcessGroup | None = None,
        output_bucket: list[torch.Tensor | None] | None = None,
    ) -> None:
        """Reduces slices to one rank, adding each to its output where it has one."""
    def allreduce_bucket(
        self,
        bucket: list[torch.Tensor],
        communication_data_type: torch.dtype,
        rank: int | None = None,
        log: Any = None,
        divide: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> torch.Tensor:
        """Decides in which dtype is reduced and by what is divided."""
    def _gradient_reduction_buffer_dtype(self) -> torch.dtype:
        """The dtype of a bucket's memory."""
    def _model_parallel_all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        """Does nothing without model parallelism."""

    # Into the sum.
    averaged_gradients: dict[int, Any]
    all_grad_tensors: dict[int, Any]

    def copy_grads_in_partition(self, param: torch.Tensor, group_idx: int | None = None) -> None: ...
    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        """True where a group's sum is one flat partition; always the same for a group."""
    def _get_compact_grad_partition_buffer(self, group_idx: int) -> GradPartitionBufferGroup:
        """Builds the group's partition where there is none."""
    def _build_compact_grad_partition_buffer(self, group_idx: int) -> GradPartitionBufferGroup: ...
    def _get_compact_grad_partition_slice(
        self, group_idx: int, partition_id: int, param_id: int, num_elements: int
    ) -> torch.Tensor | None: ...
    def _add_full_reduction_to_compact_grad_partition(
        self, reduced_tensor: torch.Tensor, communication_data_type: torch.dtype
    ) -> None:
        """Adds a whole reduced bucket to the flat partitions, where they have slices in it."""
    @staticmethod
    def _add_to_grad_partition_buffer(output: torch.Tensor | None, source: torch.Tensor) -> None: ...
    def get_flat_partition(
        self,
        tensor_list: list[torch.Tensor],
        first_offset: int,
        partition_size: int,
        dtype: torch.dtype,
        device: Any,
        param_group_idx: int,
        return_tensor_list: bool = False,
    ) -> Any: ...
    def get_all_grad_tensors(self, tensor_list: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]: ...

    # The end of a backward or request.
    def independent_gradient_partition_epilogue(self) -> None: ...
    def finalize_gradient_accumulation_boundary(self) -> None: ...
    def _finalize_cpu_offload_gradient_accumulation(self) -> None: ...

    # Under offload.
    norm_for_param_grads: dict[int, torch.Tensor]
    accumulated_grads_in_cpu: dict[int, torch.Tensor]
    offload_gradient_dict: dict[int, Any]
    offloaded_states: set[OffloadStateTypeEnum]
    _pending_offload_events: dict[Any, Any]

    def _wait_for_offload_copies(self) -> None:
        """Has the host wait for all copies that were recorded."""
    def _record_offload_copy(self) -> None:
        """Under offload, puts an event of the current stream into ``_pending_offload_events``."""
    def _get_offload_gradient_dict(self) -> None: ...
    def update_offload_overflow_tracker(self, grad: torch.Tensor | None) -> None: ...
    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = ...,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None: ...
    def reload_states(self, non_blocking: bool = False) -> None: ...

    # The step.
    _global_grad_norm: Any

    def step(self, closure: Callable[[], Any] | None = None) -> None: ...
    def has_overflow(self, partition_gradients: bool = True) -> bool: ...
    def scaled_global_norm(self, norm_type: int = 2) -> float | torch.Tensor: ...
    def _average_expert_grad_norms(self, norm_groups: list[torch.Tensor]) -> None:
        """Replaces the norms of groups of experts in the list by their means over ranks."""
    def unscale_and_clip_grads(self, grad_groups_flat: list[torch.Tensor], total_norm: Any) -> None: ...
    def _update_scale(self, has_overflow: bool = False) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def _get_loss_scale(self) -> Any: ...
    def _set_loss_scale(self, value: float) -> None:
        """The setter of ``loss_scale`` and ``cur_scale``."""
    loss_scale: Any
    cur_scale: Any

    # Muon.
    def _is_muon_group(self, tensor_list: list[torch.Tensor]) -> bool:
        """Asks the first tensor alone."""
    def _muon_update_lacks_loss_scale(self, group_index: int) -> bool:
        """True where a Muon update without the loss scale stands in place of the gradient."""
    def _apply_muon_updates_cpu_offload(self) -> None: ...
    def _commit_muon_momentum(self) -> None:
        """Called by a step that has not overflowed: a Muon update that is discarded leaves its momentum as it was."""

    # Checkpoints.
    def load_state_dict(
        self,
        state_dict_list: list[Any],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: str | None = None,
        load_serial: Any = None,
        param_shapes: Any = None,
    ) -> None: ...
