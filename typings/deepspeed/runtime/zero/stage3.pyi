from collections.abc import Callable, Container
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..base_optimizer import ZeROOptimizer
from .offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

class IPGBucketZ3:
    params: list[Any]

    def clear_params(self) -> None:
        """Forgets the gradients of a bucket and keeps its buffer."""

class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    def __init__(
        self,
        module: torch.nn.Module,
        init_optimizer: Any,
        param_names: dict[torch.Tensor, str],
        timers: Any,
        ds_config: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
        contiguous_gradients: bool = True,
        reduce_bucket_size: int = 500000000,
        prefetch_bucket_size: int = 50000000,
        max_reuse_distance: int = 1000000000,
        max_live_parameters: int = 1000000000,
        param_persistence_threshold: int = 100000,
        model_persistence_threshold: int = ...,
        dp_process_group: ProcessGroup | None = None,
        reduce_scatter: bool = True,
        overlap_comm: bool = False,
        offload_optimizer_config: Any = None,
        offload_param_config: Any = None,
        zenflow_config: Any = None,
        sub_group_size: int = 1000000000000,
        offload_ratio: float = 0.0,
        mpu: Any = None,
        clip_grad: float = 0.0,
        gradient_accumulation_dtype: torch.dtype = ...,
        communication_data_type: torch.dtype = ...,
        fp16_master_weights_and_gradients: bool = False,
        bf16_master_weights_and_gradients: bool = False,
        bf16_optimizer_states: bool = False,
        postscale_gradients: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_accumulation_steps: int = 1,
        elastic_checkpoint: bool = False,
        aio_config: Any = None,
        all2all_process_group: Any = None,
        zero_hpz_partition_size: int = 1,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        zero_module_granularity_threshold: int = 0,
        log_trace_cache_warnings: bool = False,
        enable_sanity_checks: bool = False,
        cpuadam_cores_perc: float = 0.8,
        save_muon_momentum_buffer_in_memory: bool = False,
    ) -> None:
        """Calls methods that are overridden, before an ``__init__`` that comes after it."""
    def destroy(self) -> None: ...
    def _unpin_offload_buffers(self) -> None:
        """Frees the gradients of master weights one by one, in ``destroy``."""

    module: torch.nn.Module
    parameter_offload: Any
    optimizer: torch.optim.Optimizer

    # Configuration.
    offload_optimizer: bool
    gradient_accumulation_dtype: torch.dtype
    reduce_scatter: bool
    contiguous_gradients: bool
    clip_grad: float
    dp_process_group: ProcessGroup
    sequence_parallel_size: int
    model_parallel_rank: int
    reduce_and_partition_stream: Any

    # Parameters. They have attributes of DeepSpeed's, such as ds_numel, hence Any.
    param_names: dict[torch.Tensor, str]
    fp16_groups: list[list[Any]]
    fp16_partitioned_groups_flat: list[torch.Tensor]
    fp32_partitioned_groups_flat: list[torch.Tensor]
    sub_group_process_groups: list[ProcessGroup]
    grad_partitions_flat_buffer: torch.Tensor
    grad_position: dict[Any, list[int]]

    def set_grad_positions(self) -> None:
        """Gives sub-group, offset and size of every shard; sub-groups lie in the flat buffer in their order."""
    def get_param_id(self, param: Any) -> Any: ...
    def _get_param_partition_group(self, param: Any) -> ProcessGroup: ...
    def _get_param_partition_rank(self, param: Any) -> int: ...

    # A gradient, from its hook into the sum.
    ipg_buckets: dict[torch.dtype, IPGBucketZ3]
    averaged_gradients: dict[int, Any]

    def create_reduce_and_remove_grad_hooks(self) -> None:
        """Registers the hooks that call ``reduce_ready_partitions_and_remove_grads``."""
    def reduce_ready_partitions_and_remove_grads(self, param: Any) -> None:
        """Leaves gradients on parameters inside ``coalesce_grad_reduction()``."""
    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any) -> None: ...
    def _DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket(self, param: Any) -> None:
        """Lets the gradient of a parameter be its place in the bucket, to which autograd goes on adding."""
    def _DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(
        self, communication_data_type: torch.dtype
    ) -> None: ...
    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> None: ...
    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """The engine's name for ``independent_gradient_partition_epilogue``."""
    def independent_gradient_partition_epilogue(self) -> None: ...
    def finalize_gradient_accumulation_boundary(self) -> None: ...
    def _model_parallel_all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        """Does nothing without model parallelism."""

    # What users read and write.
    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[torch.Tensor, int]: ...
    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]: ...
    def get_fp32_grad_for_param(self, param: Any) -> torch.Tensor | None: ...
    def get_local_fp32_grad_for_param(self, param: Any) -> torch.Tensor | None: ...
    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Any) -> None: ...
    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None: ...
    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: list[Any]) -> None: ...
    def set_full_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None: ...
    def set_local_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None: ...
    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = ...,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None: ...
    def reload_states(self, non_blocking: bool = False) -> None: ...

    # The step.
    overflow: bool
    _global_grad_norm: Any

    def step(self, closure: Callable[[], Any] | None = None) -> None: ...
    def has_overflow(self, partition_gradients: bool = True) -> bool: ...
    def _get_norm_groups(self) -> list[torch.Tensor]: ...
    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None: ...
    def _optimizer_step(self, sub_group_id: int) -> None: ...
    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None: ...
    def _update_scale(self, has_overflow: bool = False) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def _get_loss_scale(self) -> Any: ...
    def _set_loss_scale(self, value: float) -> None:
        """The setter of ``loss_scale`` and ``cur_scale``."""
    loss_scale: Any
    cur_scale: Any

    # Muon.
    use_muon: bool
    sub_groups_using_muon: list[bool]
    sub_groups_lacking_loss_scale: set[int]

    def _muon_update_lacks_loss_scale(self, sub_group_id: int) -> bool:
        """True where a Muon update stands in place of the gradient: the step multiplies it by the loss scale."""
    def _apply_muon_to_accumulated_grads(self) -> None: ...

    # Checkpoints.
    def checkpoint_event_prologue(self) -> None:
        """Releases every parameter, before a checkpoint is saved or loaded."""
    def checkpoint_event_epilogue(self) -> None:
        """Gathers the parameters that stay gathered, afterwards."""
    def empty_partition_cache(self) -> None:
        """Releases every parameter; ``offload_states`` does so first."""
    def _set_fp32_optimizer_param_groups(self) -> None:
        """Adds the master weights to the user's parameter groups, which are empty but in a step."""
    def _clear_fp32_optimizer_param_groups(self) -> None: ...
    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None: ...
    def load_state_dict(
        self,
        state_dict_list: list[Any],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: str | None = None,
        load_serial: Any = None,
        param_shapes: Any = None,
    ) -> None: ...
