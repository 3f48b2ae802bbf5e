"""The values in a DeepSpeed config, checked with DeepSpeed's own classes. Written for DeepSpeed 0.19.8.

DeepSpeed finds them when the engine is built, or takes them for something else. It is loaded where it is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from requestzero.config.keys import STAGE_3_KEYS
from requestzero.config.nested import Config
from requestzero.config.own_keys import own_names
from requestzero.config.removed_keys import removed_zero_keys
from requestzero.config.stage_3 import STAGE as STAGE_3
from requestzero.config.suggestion import did_you_mean
from requestzero.config.translation import AUTO
from requestzero.config.validation import Choice, Count, Number, check

BUCKET_SIZES = {
    "allgather_bucket_size": Count(even=True, unit="elements"),
    "reduce_bucket_size": Count(unit="elements"),
}
CLIPPING = Number(lowest=0, finite=False)
_DTYPES = Choice(("fp16", "bf16", "fp32"))
_USE_A_DTYPE = "use 'fp16', 'bf16' or 'fp32'"


def check_zero_section(config: Config, source: str, stage: int | None = None) -> None:
    """Raise ValueError for a ZeRO option that does not exist, that only another stage has, or with a wrong value.

    Args:
        config: a DeepSpeed config.
        source: its place, for messages.
        stage: the ZeRO stage, where another place says it; where none does, any stage's keys are allowed.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    own = own_names("zero_optimization")
    section = {key: value for key, value in config.get("zero_optimization", {}).items() if key not in own}
    fields = DeepSpeedZeroConfig.model_fields
    known = {*fields, *(field.alias for field in fields.values() if field.alias), *own}
    asked = section.get("stage") if stage is None else stage
    for key in section:
        _check_zero_key(key, known, source)
        if asked not in (None, STAGE_3):
            _check_stage_of_key(key, source)
    parsed = _parse(DeepSpeedZeroConfig, section, "zero_optimization", source)
    for key, rule in BUCKET_SIZES.items():
        if section.get(key, AUTO) != AUTO:
            check(key, getattr(parsed, key), rule, given=f"zero_optimization.{key}={section[key]!r} in {source}")


def _check_zero_key(key: str, known: set[str], source: str) -> None:
    given, removed = f"zero_optimization.{key} in {source}", removed_zero_keys()
    if key in removed:
        raise ValueError(f"{given} is not possible: {removed[key]}")
    if key not in known:
        raise ValueError(f"{given} is no ZeRO option of DeepSpeed.{did_you_mean(key, known)}")


def _check_stage_of_key(key: str, source: str) -> None:
    if key in STAGE_3_KEYS or key.startswith("stage3_"):
        raise ValueError(
            f"zero_optimization.{key} in {source} does not apply: it belongs to ZeRO stage 3; leave it out, or ask for "
            "that stage."
        )


def check_values(config: Config, source: str) -> None:
    """Raise ValueError for a value of clipping, communication, dtypes, ``fp16`` or ``bf16`` that is not allowed.

    Args:
        config: a DeepSpeed config.
        source: its place, for messages.
    """
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config

    _check_clipping(config.get("gradient_clipping", 0.0), source)
    _check_dtypes(config, source)
    fp16 = _parse(DeepSpeedFP16Config, config.get("fp16", {}), "fp16", source)
    bf16 = _parse(DeepSpeedBF16Config, config.get("bf16", {}), "bf16", source)
    if fp16.enabled and bf16.enabled:
        raise ValueError(f"fp16.enabled and bf16.enabled in {source} are both true: turn one of them off.")


def _check_clipping(value: Any, source: str) -> None:
    if value != AUTO:
        given = f"gradient_clipping={value!r} in {source}"
        advice = "use the largest norm of the gradient, or 0 for no clipping"
        check("gradient_clipping", value, CLIPPING, given=given, advice=advice)


def _check_dtypes(config: Config, source: str) -> None:
    from deepspeed.runtime.config import DtypeEnum

    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        value = config.get(key)
        if value is not None:
            check(key, str(value).lower(), _DTYPES, given=f"{key}={value!r} in {source}", advice=_USE_A_DTYPE)
    spellings = Choice(tuple(DtypeEnum._value2member_map_))
    for key in ("param_dtype", "buffer_dtype"):
        value = config.get("data_types", {}).get(key)
        if value is not None:
            check(key, value, spellings, given=f"data_types.{key}={value!r} in {source}", advice=_USE_A_DTYPE)


def _parse(model: Any, values: Mapping[str, Any], section: str, source: str) -> Any:
    """Return ``values`` as DeepSpeed's own model of a section reads them.

    Raises:
        ValueError: a value is not allowed; the message has its full key.
    """
    from pydantic import ValidationError

    try:
        # A copy without "auto", which only a front end could replace.
        return model(**copy.deepcopy({key: value for key, value in values.items() if value != AUTO}))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join([section, *map(str, first["loc"])])
        raise ValueError(f"{name}={first['input']!r} in {source} is not allowed: {first['msg']}.") from error
