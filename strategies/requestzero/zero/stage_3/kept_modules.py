"""The module of an engine, which DeepSpeed's ZeRO-3 would keep with all that it holds until the process ends."""

from __future__ import annotations

from functools import lru_cache
from inspect import getclosurevars
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

_RELEASE = "_PartitionedParameterCoordinator__params_to_release"

_engines: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""How many engines each module has that are not destroyed."""


class KeptModule:
    """Lets Python free a destroyed engine with its module, weights and optimizer state.

    # HACK: DeepSpeed 0.19.8 puts each engine's module, and every module that runs, into a list: the first it never
    # takes out, the others not where a forward raises. And it caches what a module releases by coordinator and module,
    # in a cache of the class, which the decorator of the method hides: here each coordinator has a cache of its own.

    Args:
        module: of the engine, which DeepSpeed has just put into its list.
        coordinator: of the engine's gathers.
    """

    def __init__(self, module: nn.Module, coordinator: PartitionedParameterCoordinator) -> None:
        self._module: nn.Module | None = module
        _engines[module] = _engines.get(module, 0) + 1
        cached: Any = getclosurevars(getattr(PartitionedParameterCoordinator, _RELEASE)).nonlocals["func"]
        setattr(coordinator, _RELEASE, lru_cache(maxsize=None)(MethodType(cached.__wrapped__, coordinator)))

    def forget(self) -> None:
        """Take the module out of DeepSpeed's list; once, since an engine is destroyed again when it is freed."""
        module, self._module = self._module, None
        if module is None:
            return
        _engines[module] -= 1
        parts = set(module.modules())
        others = [each for each in parameter_offload.FWD_MODULE_STACK if each not in parts]
        parameter_offload.FWD_MODULE_STACK[:] = [module] * _engines[module] + others
