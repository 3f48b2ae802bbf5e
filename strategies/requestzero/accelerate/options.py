"""The arguments of a ``RequestZeROPlugin`` as DeepSpeed keys."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from accelerate.utils.deepspeed import HfDeepSpeedConfig

from requestzero.accelerate.launch import NONE, load_named
from requestzero.config.files import load_config
from requestzero.config.merge import Source, merge
from requestzero.config.nested import Config, put
from requestzero.config.own_keys import OWN_SECTION, OWN_SECTION_OPTIONS, RETAIN_OPTION
from requestzero.config.settings import OverflowSettings, RequestZeROSettings
from requestzero.config.suggestion import did_you_mean
from requestzero.config.translation import overflow_places

ARGUMENTS = "the arguments of RequestZeROPlugin"
OPTIONS = "the options of RequestZeROPlugin"

# Argument of DeepSpeedPlugin -> DeepSpeed key.
_STOCK_ARGUMENTS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
}

# Argument of DeepSpeedPlugin -> the values that ask for nothing.
_NOT_APPLICABLE: dict[str, tuple[Any, ...]] = {
    "offload_param_device": (None, NONE),
    "offload_optimizer_nvme_path": (None, NONE),
    "offload_param_nvme_path": (None, NONE),
    "zero3_init_flag": (None, False),
    "zero3_save_16bit_model": (None, False),
    "enable_msamp": (None, False),
    "msamp_opt_level": (None,),
}

# Our own options -> DeepSpeed key; the others have none, or one that depends on the precision.
_OWN_KEYS = {
    "stage": "zero_optimization.stage",
    "offload_optimizer": "zero_optimization.offload_optimizer.device",
    RETAIN_OPTION: f"zero_optimization.{RETAIN_OPTION}",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    **{name: f"{OWN_SECTION}.{name}" for name in OWN_SECTION_OPTIONS},
}

OWN_OPTIONS = tuple(item.name for item in fields(RequestZeROSettings) if item.name != "incomplete_window")


@dataclass(frozen=True)
class OwnOptions:
    """Options without a DeepSpeed key."""

    normalization: str
    log_metrics: bool
    overflow: OverflowSettings


def argument_source(arguments: Mapping[str, Any]) -> Source:
    """The arguments that were given (not ``None``).

    Raises:
        ValueError: one that only ZeRO stage 3 or MS-AMP has.
    """
    for name, nothing in _NOT_APPLICABLE.items():
        if arguments[name] not in nothing:
            raise ValueError(
                f"{name}={arguments[name]!r} does not apply: RequestZeROPlugin makes ZeRO stages 1 and 2 request-safe, "
                "with the optimizer on the device or on the CPU; leave it out."
            )
    config: Config = {}
    for name, key in {**_STOCK_ARGUMENTS, **_OWN_KEYS}.items():
        if arguments.get(name) is not None:
            put(config, key, arguments[name])
    return Source(ARGUMENTS, config)


def option_source(options: Config) -> Source:
    """The DeepSpeed keys of ``options``, which are by the names of :mod:`requestzero.config.settings`.

    Raises:
        ValueError: an unknown option, or a value that is not allowed.
    """
    for name in options:
        if name not in OWN_OPTIONS:
            hint = (
                " The training loop decides what becomes of an incomplete window: it calls step() or zero_grad()."
                if name == "incomplete_window"
                else did_you_mean(str(name), OWN_OPTIONS)
            )
            raise ValueError(f"{name!r} in {OPTIONS} is no option: use {', '.join(OWN_OPTIONS)}.{hint}")
    given = {name: value for name, value in options.items() if value is not None}
    RequestZeROSettings(**given)
    config: Config = {}
    for name, key in _OWN_KEYS.items():
        if name in given:
            put(config, key, given[name])
    if "offload_optimizer" in given:
        put(config, _OWN_KEYS["offload_optimizer"], "cpu" if given["offload_optimizer"] else NONE)
    return Source(OPTIONS, config)


def own_options(arguments: Mapping[str, Any], options: Config) -> OwnOptions:
    """``normalization``, ``log_metrics`` and ``overflow`` from both places.

    Raises:
        ValueError: a value that is not allowed, or two different ones.
    """
    places = {ARGUMENTS: arguments, OPTIONS: options}
    merged = merge(*[Source(place, _own(given)) for place, given in places.items()])
    settings = RequestZeROSettings(**merged)
    return OwnOptions(settings.normalization, settings.log_metrics, settings.overflow)


def _own(given: Mapping[str, Any]) -> Config:
    config = {name: given[name] for name in ("normalization", "log_metrics") if given.get(name) is not None}
    said = OverflowSettings.build(given.get("overflow")).given()
    return {**config, "overflow": said} if said else config


def overflow_sources(arguments: Mapping[str, Any], options: Config) -> list[Source]:
    """Every place in a DeepSpeed config of the ``overflow`` of both, to compare them with one."""
    places = {ARGUMENTS: arguments, OPTIONS: options}
    return [
        Source(place, overflow_places(OverflowSettings.build(given.get("overflow")))) for place, given in places.items()
    ]


def load_deepspeed_config(config: Any) -> Config:
    """What ``hf_ds_config`` holds: also the forms that Accelerate takes, an ``HfDeepSpeedConfig`` or JSON text.

    Raises:
        ValueError: it cannot be read.
        FileNotFoundError: it names a file that does not exist.
    """
    if isinstance(config, HfDeepSpeedConfig):
        return load_config(config.config, "hf_ds_config")
    if isinstance(config, str) and config.lstrip().startswith("{"):
        try:
            config = json.loads(config)
        except ValueError as error:
            raise ValueError(f"hf_ds_config is text that is no JSON: {error}") from None
    if config == NONE:
        config = None
    return load_named(config, "hf_ds_config")


def describe_config(config: Any) -> str:
    """How messages name the place of ``hf_ds_config``."""
    return f"hf_ds_config={str(config)!r}" if isinstance(config, (str, os.PathLike)) else "hf_ds_config"
