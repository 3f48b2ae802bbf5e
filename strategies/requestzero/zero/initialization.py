"""``requestzero.initialize``: ``deepspeed.initialize`` with the request-safe engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from requestzero.config.cpu_adam import builds_cpu_adam
from requestzero.config.engine_options import take_engine_options
from requestzero.config.files import load_config
from requestzero.config.keys import refuse_unread_keys
from requestzero.config.nested import Config, section_of
from requestzero.config.stage_3 import STAGE as STAGE_3
from requestzero.config.stage_3 import check_model_parallelism
from requestzero.config.supported import check_supported
from requestzero.environment.cpu_adam import compile_cpu_adam
from requestzero.environment.versions import require_supported_deepspeed, require_supported_stage_3

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader, Dataset

    from requestzero.zero.engine import RequestZeROEngine
    from requestzero.zero.stage_1_and_2.optimizer import RequestZeROOptimizer
    from requestzero.zero.stage_3.optimizer import RequestZeROStage3Optimizer


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[..., LRScheduler] | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | str | PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | PathLike[str] | None = None,
) -> tuple[RequestZeROEngine, RequestZeROOptimizer | RequestZeROStage3Optimizer, DataLoader[Any] | None, Any]:
    """Build an engine whose steps apply exactly the sum of all requests of an update window. Collective.

    The arguments are those of ``deepspeed.initialize``, by the same names. ``engine.step()`` divides by nothing but
    DeepSpeed's mean over data-parallel ranks unless it is given a divisor or a normalization.

    Args:
        args: an object whose ``deepspeed_config`` may name the configuration, and ``local_rank`` the device.
        model: the module to train.
        optimizer: an optimizer of the model's parameters, or a function that makes one of parameter groups; not given:
            the one that the configuration names.
        model_parameters: parameters or parameter groups to optimize, where the optimizer is made here.
        training_data: a dataset, of which a loader is made.
        lr_scheduler: a scheduler, or a function that makes one of the optimizer.
        distributed_port: TCP port for joining the ranks where they are not joined yet.
        mpu: a model-parallel unit; at stage 3 without model parallelism.
        dist_init_required: join the ranks; not given: where they are not joined yet.
        collate_fn: of the loader that is made of ``training_data``.
        config: the DeepSpeed configuration: a dict, an OmegaConf object, or the path of a JSON or YAML file. May also
            hold this package's options, such as ``zero_optimization.retain_gpu_grad_partition_until_step``.
        mesh_param: sizes of a device mesh, as in DeepSpeed.
        config_params: another name of ``config``.

    Returns:
        The engine, its optimizer, the loader of ``training_data`` (``None`` without) and the scheduler.

    Raises:
        ImportError: the installed DeepSpeed is not supported, or not at stage 3.
        ValueError: the configuration was given in no argument or in several, cannot be read, has a key that only a
            later DeepSpeed reads, or asks for stage 0, ZenFlow, a pipeline module, DeepCompile, the hybrid engine, or
            what stage 3 refuses; or stage 3 was given no optimizer, or model parallelism.
        RuntimeError: the configuration's optimizer is DeepSpeed's CPU Adam, and it cannot be compiled.

    Example::

        engine, _, _, _ = requestzero.initialize(model=model, optimizer=optimizer, config="ds.yaml")
    """
    require_supported_deepspeed()
    import deepspeed

    args, loaded = _take_config(args, config, config_params)
    options = take_engine_options(loaded)
    check_supported(loaded, model)
    if section_of(loaded, "zero_optimization").get("stage") == STAGE_3:
        require_supported_stage_3()
        check_model_parallelism(mpu)

    from requestzero.zero.engine import RequestZeROEngine
    from requestzero.zero.patch import patched
    from requestzero.zero.process_group import without_inference_operator

    if optimizer is None and builds_cpu_adam(loaded):
        compile_cpu_adam()
    engine_class = partial(RequestZeROEngine, options=options)
    with without_inference_operator(), patched(deepspeed, "DeepSpeedEngine", engine_class):
        return deepspeed.initialize(  # type: ignore[return-value]
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=loaded,
            mesh_param=mesh_param,
        )


def _take_config(args: Any, config: Any, config_params: Any) -> tuple[Any, Config]:
    """Return ``args`` without the configuration, and the configuration, loaded from where it was given."""
    sources = {"config": config, "config_params": config_params}
    if getattr(args, "deepspeed_config", None) is not None:
        args = copy.copy(args)
        sources["args.deepspeed_config"] = args.deepspeed_config
        args.deepspeed_config = None
    found = {name: value for name, value in sources.items() if value is not None}
    if len(found) != 1:
        raise ValueError(
            f"The DeepSpeed configuration was given in {', '.join(found) or 'no argument'}: give it once, as config=."
        )
    name, value = found.popitem()
    loaded = load_config(value, name)
    refuse_unread_keys(loaded, name)
    return args, loaded
