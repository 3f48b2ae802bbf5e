"""Our options as keys of a DeepSpeed config, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from requestzero.config.nested import Config
from requestzero.config.own_keys import CHECK, OVERFLOW_SECTION, OWN_SECTION, OWN_SECTION_OPTIONS, RETAIN_OPTION
from requestzero.config.precision import counts
from requestzero.config.rules import LOSS_SCALE_KEYS, contradictions
from requestzero.config.settings import OverflowSettings, RequestZeROSettings

_UPSTREAM_KEYS = {"fp16": LOSS_SCALE_KEYS, "bf16": (CHECK,)}


def settings_to_config(settings: RequestZeROSettings) -> Config:
    """The DeepSpeed keys of everything in ``settings`` that is set, except overflow (its keys depend on precision)."""
    zero: Config = {"stage": settings.stage}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if settings.retain_gpu_grad_partition_until_step:
        zero[RETAIN_OPTION] = settings.retain_gpu_grad_partition_until_step
    config: Config = {"zero_optimization": zero}
    if settings.grad_accum_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": settings.grad_accum_dtype}
    own = {name: getattr(settings, name) for name in OWN_SECTION_OPTIONS}
    if own != {name: getattr(RequestZeROSettings, name) for name in OWN_SECTION_OPTIONS}:
        config[OWN_SECTION] = own
    return config


def overflow_to_config(overflow: OverflowSettings, precision: str) -> Config:
    """The DeepSpeed keys of the overflow options that were set, and ours in the section ``overflow``.

    Args:
        overflow: the options.
        precision: the model's dtype, ``"fp32"``, ``"bf16"`` or ``"fp16"``.

    Raises:
        ValueError: options contradict each other or the precision; the text names all of them.
    """
    overflow.check(precision)
    scaling, check, own = overflow.loss_scale_options(), overflow.check_grad_overflow, overflow.own_options()
    if check is not None and precision == "fp32":
        own[CHECK] = check
    config: Config = {"fp16": scaling} if scaling else {}
    if check is not None and precision == "bf16":
        config["bf16"] = {CHECK: check}
    return {**config, OVERFLOW_SECTION: own} if own else config


def overflow_places(overflow: OverflowSettings) -> Config:
    """Every place of the options that were set, whatever the precision: to compare them with a DeepSpeed config."""
    check = {} if overflow.check_grad_overflow is None else {CHECK: overflow.check_grad_overflow}
    own = {**overflow.own_options(), **check}
    return {"fp16": overflow.loss_scale_options(), "bf16": check, OVERFLOW_SECTION: own}


def overflow_of(config: Mapping[str, Any], precision: str | None) -> dict[str, Any]:
    """The overflow options that a DeepSpeed config sets, by their own names.

    What stands in a section ``fp16`` or ``bf16`` that is switched off is for another precision, and says nothing.

    Args:
        config: a DeepSpeed config; a section whose ``enabled`` is ``"auto"`` counts in its own precision.
        precision: the model's dtype; ``None`` where it is not known yet.
    """
    given = dict(config.get(OVERFLOW_SECTION) or {})
    for name, keys in _UPSTREAM_KEYS.items():
        section = config.get(name) or {}
        if counts(section, name, precision):
            given |= {key: _number(section[key]) for key in keys if section.get(key) not in (None, "auto")}
    return given


def _number(value: Any) -> Any:
    """16.0 as 16, which is the same to DeepSpeed."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def misplaced(config: Mapping[str, Any], precision: str) -> Iterator[str]:
    """What is wrong with the place of ``check_grad_overflow``, which in bf16 is upstream's and in fp32 ours."""
    fp16 = "the precision is fp16, which always checks: leave it out."
    if CHECK in (config.get(OVERFLOW_SECTION) or {}) and precision != "fp32":
        told = fp16 if precision == "fp16" else "the precision is bf16: use bf16.check_grad_overflow."
        yield f"overflow.{CHECK} in a DeepSpeed config is for fp32; {told}"
    section = config.get("bf16") or {}
    if CHECK in section and precision != "bf16" and counts(section, "bf16", precision):
        told = fp16 if precision == "fp16" else "the precision is fp32: use overflow.check_grad_overflow."
        yield f"bf16.{CHECK} in a DeepSpeed config is for bf16; {told}"


def merged_overflow(overflow: OverflowSettings, config: Mapping[str, Any], precision: str) -> OverflowSettings:
    """The options of a front end's arguments and those of its DeepSpeed config; they were compared before.

    Raises:
        ValueError: an option of the config is misplaced, or options contradict each other or the precision; the text
            names all of them.
    """
    given = {**overflow_of(config, precision), **overflow.given()}
    for name, value in given.items():
        OverflowSettings(**{name: value})  # each by itself, before they are compared
    problems = [*misplaced(config, precision), *contradictions(given, precision)]
    if problems:
        raise ValueError("\n".join(problems))
    return OverflowSettings(**given)
