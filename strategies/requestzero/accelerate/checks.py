"""Checks that need both a plugin and its ``Accelerator``, or the objects to prepare.

Written for Accelerate 1.15.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, InitProcessGroupKwargs

from requestzero.accelerate.request_safe_plugin import RequestSafePlugin, any_request_safe
from requestzero.config.cpu_adam import offloads_optimizer
from requestzero.config.supported import check_supported

_STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"

# Optimizers that Accelerate has a DeepSpeed counterpart on the CPU for; it replaces every other one by Adam.
_COUNTERPARTS = ("Adam", "AdamW", "Adagrad", "Lion", "AdamW32bit", "Adagrad32bit", "Lion32bit")


def check_construction(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments of an ``Accelerator`` that is given one of our plugins.

    Raises:
        ValueError: see :func:`check_arguments`.
    """
    given = inspect.signature(Accelerator.__init__).bind(None, *args, **kwargs).arguments
    if any_request_safe(given.get("deepspeed_plugin") or given.get("deepspeed_plugins")):
        check_arguments(given, os.environ)


def check_arguments(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise ValueError for arguments of an ``Accelerator`` that Accelerate would ignore without a word."""
    if arguments.get("cpu"):
        raise ValueError(
            "Accelerator(cpu=True) makes Accelerate leave DeepSpeed out: drop it. To use the CPU on a machine with "
            "GPUs, hide them with CUDA_VISIBLE_DEVICES=-1 (gpu_ids: '-1' in accelerate's config file)."
        )
    for handler in arguments.get("kwargs_handlers") or ():
        if isinstance(handler, InitProcessGroupKwargs) and torch.distributed.is_initialized():
            _check_late(handler)
    steps, launched = arguments.get("gradient_accumulation_steps", 1), environ.get(_STEPS)
    if launched is not None and steps not in (1, int(launched)):
        raise ValueError(
            f"gradient_accumulation_steps is {steps} in Accelerator(...) and {launched} in accelerate's "
            "gradient_accumulation_steps (config file or flag): set it in one place, or to the same value."
        )


def _check_late(handler: InitProcessGroupKwargs) -> None:
    default = InitProcessGroupKwargs(backend=handler.backend)
    if (handler.timeout, handler.init_method) != (default.timeout, default.init_method):
        raise ValueError(
            f"InitProcessGroupKwargs(timeout={handler.timeout}, init_method={handler.init_method!r}) comes too late: "
            "the ranks are joined already (on the CPU when the RequestZeROPlugin is built). Call "
            "torch.distributed.init_process_group with these before, and leave the handler out."
        )


def check_steps(plugin: RequestSafePlugin, steps: int) -> int:
    """Return the requests per update on which the plugin and the Accelerator agree. 1 is Accelerate's default.

    A value that the Accelerator has from the plugin gives way to what the plugin says now.

    Raises:
        ValueError: they do not.
    """
    said = plugin.plan.steps
    if said is None:
        return steps
    if steps not in (1, said, plugin.adopted_steps):
        place = plugin.plan.places_of("gradient_accumulation_steps")
        raise ValueError(
            f"gradient_accumulation_steps is {said} in {place} and {steps} in the Accelerator: set it in one place, to "
            "the same value, or to 'auto'."
        )
    return said


def check_objects(accelerator: Accelerator, objects: Sequence[Any]) -> None:
    """Raise ValueError for what cannot be prepared together."""
    models = [item for item in objects if isinstance(item, torch.nn.Module)]
    optimizers = [item for item in objects if isinstance(item, (torch.optim.Optimizer, DummyOptim))]
    if len(models) != len(optimizers):
        raise ValueError(
            f"accelerator.prepare() got {len(models)} model(s) and {len(optimizers)} optimizer(s): with ZeRO "
            "one of each belongs together in one call. (A model that is not trained needs no prepare: move it to "
            "accelerator.device.)"
        )
    if models and accelerator.deepspeed_engine_wrapped is not None:
        raise ValueError(
            "This Accelerator has prepared a model already, and its backward() would go on with that one: build "
            "another Accelerator() for another model."
        )
    config = accelerator.deepspeed_plugin.deepspeed_config
    for model in models:
        check_supported(config, model)
    for optimizer in optimizers:
        _check_counterpart(config, optimizer)


def replaced_by_cpu_adam(config: Mapping[str, Any], objects: Iterable[Any]) -> bool:
    """Return true if one of the objects is an optimizer in whose place Accelerate builds ``DeepSpeedCPUAdam``."""
    return _replaces(config) and any(isinstance(item, (torch.optim.Adam, torch.optim.AdamW)) for item in objects)


def _replaces(config: Mapping[str, Any]) -> bool:
    """Return true if Accelerate builds DeepSpeed's counterparts of optimizers."""
    return offloads_optimizer(config) and bool(config.get("zero_force_ds_cpu_optimizer", True))


def _check_counterpart(config: Mapping[str, Any], optimizer: Any) -> None:
    name = type(optimizer).__name__
    if _replaces(config) and not isinstance(optimizer, DummyOptim) and name not in _COUNTERPARTS:
        if type(optimizer).__module__.startswith("deepspeed."):
            return
        raise ValueError(
            f"With optimizer offload Accelerate replaces {name} by DeepSpeedCPUAdam, another optimizer: set "
            "zero_force_ds_cpu_optimizer to false in the DeepSpeed config to keep yours, or use Adam or AdamW."
        )
