"""``requestzero.initialize``: ``deepspeed.initialize`` with the request-safe engine."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

from requestzero.config.engine_options import take_engine_options
from requestzero.config.files import load_config
from requestzero.config.supported import check_supported
from requestzero.environment.versions import require_supported_deepspeed


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Build an engine whose steps apply exactly the sum of all requests of an update window (collective).

    Takes the arguments of ``deepspeed.initialize`` and returns what it returns, ``(engine, optimizer, dataloader,
    lr_scheduler)``; the engine is a :class:`~requestzero.zero.engine.RequestZeROEngine`. ``config`` may be a
    dict, a path to a JSON or YAML file, or an OmegaConf object, and may set
    ``zero_optimization.retain_gpu_grad_partition_until_step`` (bool or ``"auto"``, default false).

    Raises:
        ImportError: the installed DeepSpeed is not supported.
        ValueError: the configuration cannot be read, or asks for stage 0 or 3, ZenFlow, a pipeline module, DeepCompile
            or the hybrid engine.
    """
    require_supported_deepspeed()
    import deepspeed

    given = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    config = _take_config(given)
    options = take_engine_options(config)
    check_supported(config, given.get("model"))

    from requestzero.zero.engine import RequestZeROEngine
    from requestzero.zero.patch import replaced
    from requestzero.zero.process_group import without_inference_operator

    engine_class = partial(RequestZeROEngine, options=options)
    with without_inference_operator(), replaced(deepspeed, "DeepSpeedEngine", engine_class):
        return deepspeed.initialize(**given, config=config)


def _take_config(given: dict[str, Any]) -> dict[str, Any]:
    """Remove the configuration from the arguments, wherever it stands in them, and load it."""
    sources = {name: given.pop(name, None) for name in ("config", "config_params")}
    if getattr(given.get("args"), "deepspeed_config", None) is not None:
        given["args"] = copy.copy(given["args"])
        sources["args.deepspeed_config"] = given["args"].deepspeed_config
        given["args"].deepspeed_config = None
    found = {name: value for name, value in sources.items() if value is not None}
    if len(found) != 1:
        raise ValueError(
            f"The DeepSpeed configuration was given in {', '.join(found) or 'no argument'}: give it once, as config=."
        )
    name, value = found.popitem()
    return load_config(value, name)
