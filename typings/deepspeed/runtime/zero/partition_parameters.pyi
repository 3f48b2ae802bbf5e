from enum import Enum
from typing import Any

import torch
from torch.distributed import ProcessGroup

class ZeroParamStatus(Enum):
    AVAILABLE = 1
    """The parameter is whole, and not being gathered."""
    NOT_AVAILABLE = 2
    """This rank has its part only."""
    INFLIGHT = 3
    """The parameter is being gathered."""

def free_param(param: torch.nn.Parameter) -> None:
    """Gives a gathered weight up, as after its module's forward."""

class AllGatherHandle:
    """One weight, gathered into its place or copied there; waits again after an error."""

    def wait(self, handle_dependency: bool = True) -> None: ...

class AllGatherCoalescedHandle:
    """Weights in one buffer, cut out of it after the wait; waits again after an error, where all are in flight."""

    def wait(self, handle_dependency: bool = True) -> None: ...

def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Keeps the parameter in ``module._external_params``, by its ``id``."""

class InsertPostInitMethodToModuleSubClasses:
    def __enter__(self) -> Any:
        """Patches the constructors of modules."""
    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> Any:
        """Takes the patches away again."""

class Init(InsertPostInitMethodToModuleSubClasses):
    """Cuts the parameters of modules that are built within it over the ranks."""

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        data_parallel_group: ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = ...,
    ) -> None:
        """Reads ``zero_optimization`` of the config, and joins the ranks if they are not joined."""
    def _convert_to_deepspeed_param(self, param: torch.nn.Parameter) -> None:
        """Gives it its gathers: the coalesced one puts weights in flight, allocates, and communicates by ``dist``."""

class GatheredParameters:
    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
    ) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: Any) -> Any: ...
