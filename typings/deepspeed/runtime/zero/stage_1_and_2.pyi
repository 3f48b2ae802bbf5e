from collections.abc import Callable, Container
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ..base_optimizer import ZeROOptimizer
from .offload_config import DeepSpeedZeroOffloadOptimizerConfig, OffloadDeviceEnum, OffloadStateTypeEnum

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
    optimizer: Optimizer
    cpu_offload: bool
    reduce_scatter: bool
    overlap_comm: bool
    use_multi_rank_bucket_allreduce: bool
    use_grad_accum_attribute: bool
    reduce_bucket_size: int
    gradient_average: bool
    postscale_gradients: bool
    gradient_predivide_factor: float
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
    bit16_groups: list[list[Any]]
    bit16_groups_flat: list[torch.Tensor]
    round_robin_bit16_groups: list[list[Any]]
    round_robin_bit16_meta: list[list[torch.Tensor]]
    round_robin_bit16_offsets: list[list[int]]
    single_partition_of_fp32_groups: list[torch.Tensor]
    params_in_partition: list[list[Any]]
    partition_size: list[int]
    first_offset: list[int]

    def _update_model_bit16_weights(self, group_index: int) -> None: ...

    # A gradient, from its hook into the sum.
    _coalesce_grad_reduction: bool
    averaged_gradients: dict[int, Any]
    all_grad_tensors: dict[int, Any]
    autoep_folding_tp_group: ProcessGroup | None

    _grad_acc_hooks: list[Any]

    def create_gradient_handling_hooks(self) -> None:
        """Registers the hooks that call ``process_gradients``, and keeps their handles; not always called."""
    def process_gradients(self, param: torch.Tensor, i: int) -> None: ...
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None: ...
    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """The engine's name for ``independent_gradient_partition_epilogue``."""
    def independent_gradient_partition_epilogue(self) -> None: ...
    def finalize_gradient_accumulation_boundary(self) -> None: ...
    def configure_autoep_folding_tp_gradient_reduction(self, folding_spec: Any) -> None: ...
    def _maybe_reduce_autoep_folding_tp_gradient(self, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Corrects a gradient in place."""
    def _model_parallel_all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        """Does nothing without model parallelism."""

    # Under offload, and what users read and write.
    offload_gradient_dict: dict[int, Any]
    offloaded_states: set[OffloadStateTypeEnum]

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
    overflow: bool
    _global_grad_norm: Any

    def step(self, closure: Callable[[], Any] | None = None) -> None: ...
    def update_lp_params(self) -> None:
        """Copies the master weights into the model's, and gathers those."""
    def _optimizer_step(self, group_no: int) -> None:
        """Updates the master weights of one group."""
    def _get_preflattened_grad_partition(self, group_idx: int) -> torch.Tensor | None:
        """Takes ``flat_partition`` of a group's entry in ``averaged_gradients`` for its gradient."""
    def has_overflow(self, partition_gradients: bool = True) -> bool: ...
    def scaled_global_norm(self, norm_type: int = 2) -> float | torch.Tensor: ...
    norm_for_param_grads: dict[int, torch.Tensor]

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
    def get_flat_partition(
        self,
        tensor_list: list[torch.Tensor],
        first_offset: int,
        partition_size: int,
        dtype: torch.dtype,
        device: Any,
        param_group_idx: int,
        return_tensor_list: bool = False,
    ) -> Any:
        """Turns ``all_grad_tensors`` of a Muon group into updates, and stages its momentum."""
    def _get_flat_partition_unpadded(
        self,
        tensor_list: list[torch.Tensor],
        first_offset: int,
        partition_size: int,
        dtype: torch.dtype,
        device: Any,
        param_group_idx: int,
        return_tensor_list: bool = False,
    ) -> Any:
        """The same without alignment padding."""
    def _is_muon_group(self, tensor_list: list[torch.Tensor]) -> bool:
        """Asks the first tensor alone."""
    def _muon_update_lacks_loss_scale(self, group_index: int) -> bool:
        """True where a Muon update stands in place of the gradient: the step multiplies it by the loss scale."""
    def _apply_muon_updates_cpu_offload(self) -> None: ...

    # Checkpoints.
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(
        self,
        state_dict_list: list[Any],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: str | None = None,
        load_serial: Any = None,
        param_shapes: Any = None,
    ) -> None: ...

    # Checkpoints.
    def _create_param_mapping(self) -> list[dict[str, Any]]:
        """Gives the place of every owned part in this rank's partition, by name, which a checkpoint keeps."""
    def _load_legacy_checkpoint(
        self, state_dict_list: list[Any], load_optimizer_states: bool = True, load_from_fp32_weights: bool = False
    ) -> None:
        """Loads the entry of this rank's position, whose flat states are partitions of today's layout."""
