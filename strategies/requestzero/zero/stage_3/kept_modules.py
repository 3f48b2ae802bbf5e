"""The modules of destroyed engines, which DeepSpeed's ZeRO-3 would keep for as long as the process runs."""

from __future__ import annotations

from inspect import getclosurevars

from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn


def forget_module(module: nn.Module) -> None:
    """Let Python free a module whose engine is destroyed, with the engine, its weights and its optimizer state.

    # HACK: DeepSpeed 0.19.8 puts each engine's module into a list, for parameters that are used outside of their
    # modules, and never takes it out. And it caches what a module releases by coordinator and module, in a cache of
    # the class, which the decorator of the method hides. Other engines fill it again.
    """
    parameter_offload.FWD_MODULE_STACK[:] = [each for each in parameter_offload.FWD_MODULE_STACK if each is not module]
    measured = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    getclosurevars(measured).nonlocals["func"].cache_clear()
