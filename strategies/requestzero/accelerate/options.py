"""The arguments of a ``RequestZeROPlugin`` as DeepSpeed keys."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from accelerate.utils.deepspeed import HfDeepSpeedConfig

from requestzero.accelerate.launch import NONE, SAVE_16BIT
from requestzero.config.files import load_config
from requestzero.config.merge import Source, merge, overlay
from requestzero.config.nested import Config, put
from requestzero.config.option_record import FrontEnd, names_in, options_of
from requestzero.config.options import OverflowSettings, RequestZeROSettings
from requestzero.config.suggestion import did_you_mean
from requestzero.config.translation import to_config

ARGUMENTS = "the arguments of RequestZeROPlugin"
OPTIONS = "the options of RequestZeROPlugin"

OWN_KEYS = "_requestzero_own_keys"
"""Attribute of an ``HfDeepSpeedConfig`` with our keys of its config, which others hand to DeepSpeed without them."""

OWN_OPTIONS = names_in(RequestZeROSettings, FrontEnd.ACCELERATE)

# Argument of DeepSpeedPlugin -> DeepSpeed key.
_STOCK_ARGUMENTS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "zero3_save_16bit_model": SAVE_16BIT,
}

# Argument of DeepSpeedPlugin -> the values that ask for nothing.
_NOT_APPLICABLE: dict[str, tuple[Any, ...]] = {
    "offload_optimizer_nvme_path": (None, NONE),
    "offload_param_nvme_path": (None, NONE),
    "enable_msamp": (None, False),
    "msamp_opt_level": (None,),
}


def argument_source(arguments: Mapping[str, Any]) -> Source:
    """Return the DeepSpeed keys of the arguments that were given (not ``None``).

    Raises:
        ValueError: one of NVMe offload or MS-AMP.
    """
    for name, nothing in _NOT_APPLICABLE.items():
        if arguments[name] not in nothing:
            raise ValueError(
                f"{name}={arguments[name]!r} does not apply: RequestZeROPlugin makes ZeRO request-safe with optimizer "
                "and weights on the device or on the CPU, and without MS-AMP; leave it out."
            )
    stock: Config = {}
    for name, key in _STOCK_ARGUMENTS.items():
        if arguments.get(name) is not None:
            put(stock, key, arguments[name])
    return Source(ARGUMENTS, overlay(stock, to_config(RequestZeROSettings, arguments)))


def option_source(options: Config) -> Source:
    """Return the DeepSpeed keys of ``options``, which are by the names of :mod:`requestzero.config.options`.

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
    return Source(OPTIONS, to_config(RequestZeROSettings, given))


def settings_without_keys(arguments: Mapping[str, Any], options: Config) -> RequestZeROSettings:
    """Return the settings that have no DeepSpeed key, and ``overflow``, as both places have decided them.

    Raises:
        ValueError: a value that is not allowed, or two different ones.
    """
    places = {ARGUMENTS: arguments, OPTIONS: options}
    return RequestZeROSettings(**merge(*[Source(place, _without_keys(given)) for place, given in places.items()]))


def _without_keys(given: Mapping[str, Any]) -> Config:
    own = [name for name, option in options_of(RequestZeROSettings).items() if not option.keys]
    config = {name: given[name] for name in own if given.get(name) is not None}
    overflow = OverflowSettings.build(given.get("overflow")).given()
    return {**config, "overflow": overflow} if overflow else config


def overflow_sources(arguments: Mapping[str, Any], options: Config) -> list[Source]:
    """Return every key of the ``overflow`` of both in a DeepSpeed config, to compare them with one."""
    places = {ARGUMENTS: arguments, OPTIONS: options}
    return [
        Source(place, to_config(OverflowSettings, OverflowSettings.build(given.get("overflow")).given()))
        for place, given in places.items()
    ]


def load_deepspeed_config(config: Any) -> Config:
    """Return what ``hf_ds_config`` holds: also in the forms of Accelerate, an ``HfDeepSpeedConfig`` or JSON text.

    Raises:
        ValueError: it cannot be read.
        FileNotFoundError: it names a file that does not exist.
    """
    if isinstance(config, HfDeepSpeedConfig):
        return overlay(load_config(config.config, "hf_ds_config"), getattr(config, OWN_KEYS, {}))
    if isinstance(config, str) and config.lstrip().startswith("{"):
        try:
            config = json.loads(config)
        except ValueError as error:
            raise ValueError(f"hf_ds_config is text that is no JSON: {error}") from None
    if config == NONE:
        config = None
    return load_config(config, "hf_ds_config")


def describe_config(config: Any) -> str:
    """Return how messages name the place of ``hf_ds_config``."""
    return f"hf_ds_config={str(config)!r}" if isinstance(config, (str, os.PathLike)) else "hf_ds_config"
