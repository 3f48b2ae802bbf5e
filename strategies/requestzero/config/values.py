"""The values in a DeepSpeed config, checked with DeepSpeed's own classes. Written for DeepSpeed 0.19.8."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from requestzero.config.keys import STAGE_3_KEYS
from requestzero.config.nested import Config
from requestzero.config.own_keys import RETAIN_OPTION
from requestzero.config.suggestion import did_you_mean


def check_zero_section(config: Config, source: str) -> None:
    """Raise ValueError for a ZeRO option that does not exist, that only stage 3 has, or with a wrong value.

    DeepSpeed, which is imported for it, looks at this section only when the engine is built.
    """
    from deepspeed.runtime.config import _REMOVED_ZERO_CONFIG_KEYS
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    section: dict[str, Any] = {
        key: value for key, value in config.get("zero_optimization", {}).items() if key != RETAIN_OPTION
    }
    fields = DeepSpeedZeroConfig.model_fields
    names = {*fields, *(field.alias for field in fields.values() if field.alias), RETAIN_OPTION}
    for key in section:
        if key in _REMOVED_ZERO_CONFIG_KEYS:
            raise ValueError(f"zero_optimization.{key} in {source} is not possible: {_REMOVED_ZERO_CONFIG_KEYS[key]}")
        if key not in names:
            raise ValueError(
                f"zero_optimization.{key} in {source} is no ZeRO option of DeepSpeed.{did_you_mean(str(key), names)}"
            )
        if key in STAGE_3_KEYS or key.startswith("stage3_"):
            raise ValueError(
                f"zero_optimization.{key} in {source} does not apply: it belongs to ZeRO stage 3, and RequestZeRO "
                "makes stages 1 and 2 request-safe; leave it out."
            )
    parsed = _parse(DeepSpeedZeroConfig, section, "zero_optimization", source)
    for key in section.keys() & BUCKET_SIZES:
        if section[key] != "auto":
            check_bucket_size(key, getattr(parsed, key), f"zero_optimization.{key}={section[key]!r} in {source}")


BUCKET_SIZES = frozenset(["allgather_bucket_size", "reduce_bucket_size"])


def check_bucket_size(name: str, size: Any, given: str) -> None:
    """Raise ValueError unless ``size``, in elements, is one that ZeRO 1 and 2 accept.

    Args:
        name: one of ``BUCKET_SIZES``.
        given: what was given where, for the message.
    """
    whole = isinstance(size, int) and not isinstance(size, bool) and size > 0
    if name == "allgather_bucket_size" and (not whole or size % 2):
        raise ValueError(f"{given} is not allowed: use an even whole number above 0, in elements.")
    if not whole:
        raise ValueError(f"{given} is not allowed: use a whole number above 0, in elements.")


def check_values(config: Config, source: str) -> None:
    """Raise ValueError for a value of clipping, communication, dtypes, ``fp16`` or ``bf16`` that is not allowed.

    DeepSpeed, which is imported for it, would find it when the engine is built, or take it for something else.
    """
    from deepspeed.runtime.config import DtypeEnum
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config

    _check_clipping(config.get("gradient_clipping", 0.0), source)
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        value = config.get(key)
        if value is not None and str(value).lower() not in ("fp16", "bf16", "fp32"):
            raise ValueError(f"{key}={value!r} in {source} is not allowed: use 'fp16', 'bf16' or 'fp32'.")
    for key in ("param_dtype", "buffer_dtype"):
        value = config.get("data_types", {}).get(key)
        if value is not None and value not in DtypeEnum._value2member_map_:
            raise ValueError(f"data_types.{key}={value!r} in {source} is not allowed: use 'fp16', 'bf16' or 'fp32'.")
    fp16 = _parse(DeepSpeedFP16Config, config.get("fp16", {}), "fp16", source)
    bf16 = _parse(DeepSpeedBF16Config, config.get("bf16", {}), "bf16", source)
    if fp16.enabled and bf16.enabled:
        raise ValueError(f"fp16.enabled and bf16.enabled in {source} are both true: turn one of them off.")


def _check_clipping(value: Any, source: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    if value != "auto" and (not number or value < 0):
        raise ValueError(
            f"gradient_clipping={value!r} in {source} is not allowed: use the largest norm of the gradient, or 0 for "
            "no clipping."
        )


def _parse(model: Any, values: Mapping[str, Any], section: str, source: str) -> Any:
    """``values`` as DeepSpeed's own model of a section reads them; ValueError with the full key otherwise."""
    from pydantic import ValidationError

    try:
        # A copy without "auto", which only a front end could replace.
        return model(**copy.deepcopy({key: value for key, value in values.items() if value != "auto"}))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join([section, *map(str, first["loc"])])
        raise ValueError(f"{name}={first['input']!r} in {source} is not allowed: {first['msg']}.") from error
