"""Every name of DeepSpeed that requestzero uses: what is not here fails the type check.

Tests compare each entry with the installed DeepSpeed. A docstring says which behaviour is relied on, and has the source
pinned in tests/upstream_contract.json, as the sources of overridden methods are.
"""

from collections.abc import Callable
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from . import ops as ops
from .comm.comm import init_distributed as init_distributed
from .runtime.activation_checkpointing import checkpointing as checkpointing
from .runtime.engine import DeepSpeedEngine as DeepSpeedEngine

def initialize(
    args: Any = None,
    model: Module | None = None,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[..., LRScheduler] | None = None,
    distributed_port: int = ...,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | dict[str, Any] | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Builds ``DeepSpeedEngine``, looked up by its name in this module."""
