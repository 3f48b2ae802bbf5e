from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import Dataset

from .precision_config import BFLOAT16 as BFLOAT16
from .zero.config import ZERO_OPTIMIZATION as ZERO_OPTIMIZATION
from .zero.stage_1_and_2 import DeepSpeedZeroOptimizer as DeepSpeedZeroOptimizer

class DeepSpeedEngine(Module):
    # DeepSpeed looks every unknown name up in the user's module, and torch among parameters and submodules: nothing
    # here may rely on that, and an unknown name is an error.
    __getattr__: None  # type: ignore[assignment, misc]

    module: Module
    optimizer: Any
    global_steps: int
    skipped_steps: int
    global_rank: int
    local_rank: int
    device: torch.device
    checkpoint_engine: Any
    has_moe_layers: bool
    inside_no_sync_ctxt: bool
    _config: Any
    _global_grad_norm: Any
    _is_gradient_accumulation_boundary: bool | None
    _running_engine_step: bool
    _running_engine_backward: bool
    _step_applied: bool
    _unmanaged_backward_count: int

    def __init__(
        self,
        args: Any,
        model: Module,
        optimizer: Optimizer | Callable[..., Optimizer] | None = None,
        model_parameters: Any = None,
        training_data: Dataset[Any] | None = None,
        lr_scheduler: Any = None,
        mpu: Any = None,
        dist_init_required: bool | None = None,
        collate_fn: Callable[..., Any] | None = None,
        config: Any = None,
        config_class: Any = None,
        mesh_device: Any = None,
        dont_change_device: bool = False,
    ) -> None: ...
    def destroy(self) -> None: ...
    def _do_optimizer_sanity_check(self, basic_optimizer: Optimizer) -> str | None: ...
    def _configure_zero_optimizer(self, optimizer: Optimizer | None) -> Any: ...

    # What is configured.
    def bfloat16_enabled(self) -> bool: ...
    def fp16_enabled(self) -> bool: ...
    def zero_optimization_stage(self) -> int: ...
    def zero_optimization_partition_gradients(self) -> bool: ...
    def zero_optimization_partition_weights(self) -> bool: ...
    def gradient_accumulation_steps(self) -> int: ...
    def managed_gradient_accumulation(self) -> bool: ...
    def zero_offload_optimizer(self) -> Any: ...
    def use_node_local_storage(self) -> bool: ...
    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The model's dtype, and that in which gradients are accumulated."""

    # A micro-batch.
    def forward(self, *inputs: Any, **kwargs: Any) -> Any: ...
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any: ...
    def _backward_prologue(self) -> None: ...
    def _backward_epilogue(self) -> None: ...
    def _backward_post_hook(self) -> None:
        """Runs the epilogue of a backward that the user has started with ``loss.backward()``."""
    def no_sync(self) -> AbstractContextManager[None]:
        """Sets ``inside_no_sync_ctxt``, by which the epilogue reduces nothing."""
    def coalesce_grad_reduction(self) -> AbstractContextManager[None]: ...
    def _flush_coalesced_reduction_zero12(self, optimizer: DeepSpeedZeroOptimizer) -> None: ...
    def allreduce_gradients(self, bucket_size: int = ...) -> None:
        """Reduces in every backward at stage 2, and at a boundary at stage 1."""
    def is_gradient_accumulation_boundary(self) -> bool: ...
    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decides for the backwards that follow, until it is called again."""

    # A step.
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None: ...
    def _take_model_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        """Counts applied and skipped updates by the optimizer's ``overflow``."""
    def zero_grad(self) -> None: ...  # type: ignore[override]
    def was_step_applied(self) -> bool: ...
    def get_lr(self) -> list[float]: ...
    def get_global_grad_norm(self) -> Any: ...

    # Checkpoints.
    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] = {},
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool: ...
    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any]]: ...
    loaded_checkpoint_dp_world_size: int
    seq_dp_world_size: int
    def load_universal_checkpoint(self) -> bool: ...
    def zero_load_from_fp32_weights(self) -> bool: ...
    def _load_checkpoint(
        self,
        load_dir: str,
        tag: str,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Comes before anything is loaded, and gets the tag that was found where none was given."""
    def _load_zero_checkpoint(self, load_dir: str, tag: str, load_optimizer_states: bool = True) -> bool:
        """Comes when the module is loaded and the saved number of ranks is known."""
    def _get_all_zero_checkpoint_names(self, load_dir: str, tag: str, bf16_mode: bool) -> list[str]: ...
