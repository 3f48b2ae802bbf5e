"""Decisions of ``accelerate launch``, as values of the recipe's configuration.

``${launched:stage}`` in a YAML file is the value in accelerate's config file (and the DeepSpeed file that it names), or
a default where there is none or the recipe was started in another way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf

from requestzero.config.options import OverflowSettings, RequestZeROSettings
from requestzero.config.precision import PRECISIONS
from requestzero.config.translation import from_config

RESOLVER = "launched"
_OFFLOADS = ("offload_optimizer", "offload_parameters")
SHOWN = {"stage", *_OFFLOADS, "retain_gpu_grad_partition_until_step", "grad_accum_dtype"}
"""Keys of ``zero`` that are compared."""

_MODES = {"bf16": "bf16-true", "fp16": "16-true", "no": "32-true"}
_DEFAULTS = {
    **{name: getattr(RequestZeROSettings, name) for name in SHOWN},
    "grad_accum_dtype": "fp32",
    "mode": "32-true",
    "num_nodes": 1,
}


def register_launched() -> None:
    """Register ``${launched:...}`` with OmegaConf. A second call reads the environment again."""
    _said.cache_clear()
    OmegaConf.register_new_resolver(RESOLVER, launched, replace=True)


def launched(key: str) -> Any:
    """Return the value of ``key``: one of ``SHOWN``, ``mode`` (Lightning's name of the precision) or ``num_nodes``."""
    value = _said().get(key)
    return _DEFAULTS.get(key) if value is None else value


def launch_problems(cfg: Any) -> Iterator[str]:
    """Yield the values of the configuration that contradict what the ranks were launched with."""
    said = _said()
    given: dict[str, Any] = {f"zero.{key}": (cfg.zero[key], said.get(key)) for key in sorted(SHOWN)}
    given["trainer.num_nodes"] = (cfg.trainer.num_nodes, said.get("num_nodes"))
    given["trainer.devices"] = (cfg.trainer.devices, said.get("devices"))
    for key, (value, launched_value) in given.items():
        if launched_value is not None and value not in (None, launched_value):
            yield _problem(key, value, launched_value)
    if cfg.zero.incomplete_window != "step":
        yield (
            f"zero.incomplete_window={cfg.zero.incomplete_window!r} is not allowed: the loop of this recipe steps at "
            "an epoch's end."
        )
    yield from _overflow_problems(cfg)
    mode = said.get("mode")
    if mode is not None and PRECISIONS.get(cfg.precision.mode) not in (None, PRECISIONS[mode]):
        yield _problem("precision.mode", cfg.precision.mode, mode)


def _overflow_problems(cfg: Any) -> Iterator[str]:
    """Yield the overflow options of the DeepSpeed file that the configuration contradicts."""
    from requestzero.accelerate.launch import PRECISION_PLACE, launched_sources
    from requestzero.config.merge import merge

    precision = PRECISIONS.get(cfg.precision.mode)
    sources = [source for source in launched_sources(os.environ) if not source.place.startswith(PRECISION_PLACE)]
    said = from_config(OverflowSettings, merge(*sources), precision)
    given = {key: value for key, value in cfg.overflow.items() if value is not None}
    for key, value in given.items():
        if said.get(key, value) != value:
            yield _problem(f"overflow.{key}", value, said[key])
    contradictions = OverflowSettings.contradictions
    yield from set(contradictions({**said, **given}, precision)) - set(contradictions(given, precision))


def _problem(key: str, value: Any, launched_value: Any) -> str:
    return (
        f"{key}={value!r} is not allowed: accelerate launch says {launched_value!r} (its config file or flags, or the "
        "DeepSpeed file that it names). Leave the override out, or launch with another config file."
    )


@lru_cache(maxsize=1)
def _said() -> dict[str, Any]:
    """Return what was said; keys about which nobody has said anything are missing."""
    from requestzero.accelerate.launch import launched_precision, launched_sources
    from requestzero.config.merge import merge
    from requestzero.config.nested import look_up

    config = merge(*launched_sources(os.environ))
    given = from_config(RequestZeROSettings, config)
    said = {name: given[name] for name in SHOWN if name in given}
    if "zero_optimization" in config:
        said.update({name: given.get(name) is True for name in _OFFLOADS})
    enabled = [name for name in ("bf16", "fp16") if look_up(config, f"{name}.enabled") is True]
    precision = enabled[0] if enabled else launched_precision(os.environ)
    if precision in _MODES:
        said["mode"] = _MODES[precision]
    return {**said, **_ranks()}


def _ranks() -> dict[str, int]:
    ranks, local = (int(os.environ.get(name, 0)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return {"num_nodes": ranks // local, "devices": local} if ranks and local else {}
