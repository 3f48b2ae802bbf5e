"""The overflow options in a DeepSpeed config: DeepSpeed's own places, and our section ``overflow`` for the rest.

Light on purpose, as :mod:`requestzero.config.deepspeed_config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from requestzero.config.deepspeed_config import section_of
from requestzero.config.nearest import nearest
from requestzero.config.overflow_rules import LOSS_SCALE_KEYS, contradictions
from requestzero.config.settings import OWN_OVERFLOW_KEYS, OverflowSettings

CHECK = "check_grad_overflow"
OVERFLOW_SECTION = "overflow"
"""Our own section of a DeepSpeed config, for the overflow options that have no place upstream."""

_SECTION_KEYS = (*OWN_OVERFLOW_KEYS, CHECK)
_UPSTREAM_KEYS = {"fp16": LOSS_SCALE_KEYS, "bf16": (CHECK,)}

Config = dict[str, Any]


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


def check_overflow_section(config: Mapping[str, Any], source: str) -> None:
    """Raise ValueError where the section ``overflow`` is no mapping, or holds a wrong key or a wrong single value.

    Args:
        config: a DeepSpeed config.
        source: its place, for messages.
    """
    section = config.get(OVERFLOW_SECTION, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"{OVERFLOW_SECTION}={section!r} in {source} is not allowed: give a mapping of its options.")
    for key in section:
        if key in LOSS_SCALE_KEYS:
            raise ValueError(f"overflow.{key} in {source} has its own place in a DeepSpeed config: use fp16.{key}.")
        if key not in _SECTION_KEYS:
            raise ValueError(
                f"overflow.{key} in {source} is no overflow option: use one of {', '.join(_SECTION_KEYS)}."
                f"{nearest(str(key), [item.name for item in fields(OverflowSettings)])}"
            )
    try:
        for key, value in section.items():
            OverflowSettings(**{key: value})
    except ValueError as error:
        raise ValueError(f"In {source}: {error}") from error


def precision_of(config: Mapping[str, Any]) -> str:
    """``"fp16"``, ``"bf16"`` or ``"fp32"``: what the sections of a DeepSpeed config turn on.

    Raises:
        ValueError: one of them is no mapping.
    """
    return next((name for name in ("fp16", "bf16") if section_of(config, name).get("enabled") is True), "fp32")


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
        if _counts(section, name, precision):
            given |= {key: _number(section[key]) for key in keys if section.get(key) not in (None, "auto")}
    return given


def _counts(section: Mapping[str, Any], name: str, precision: str | None) -> bool:
    enabled = section.get("enabled", True)
    return bool(name == precision if enabled == "auto" else enabled)


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
    if CHECK in section and precision != "bf16" and _counts(section, "bf16", precision):
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
