"""Overflow options that contradict each other, found all at once and told in the same words by every door.

Only the standard library is imported; :mod:`requestzero.config.settings` owns the options and their single values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LOSS_SCALE_KEYS = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)
"""Options of fp16; those behind the first one are for dynamic loss scaling only."""

# DeepSpeed's defaults, against which a value that is given alone is held.
_INITIAL_SCALE_POWER, _HYSTERESIS, _MIN_LOSS_SCALE = 16, 2, 1

Given = Mapping[str, Any]


def contradictions(given: Given, precision: str | None = None) -> list[str]:
    """Everything that cannot be meant together; each text names the options that disagree and says what to do.

    Args:
        given: options by name, each of an allowed value; ``None`` is not given.
        precision: the model's dtype, ``"fp32"``, ``"bf16"`` or ``"fp16"``; ``None`` where it is not known yet, which
            finds only what no precision could make right.
    """
    said = {name: value for name, value in given.items() if value is not None}
    return [problem for rule in _RULES for problem in rule(said, precision)]


def _name(said: Given, name: str) -> str:
    """The option with its value, and where it stands in a DeepSpeed config if that is elsewhere."""
    places = {"check_grad_overflow": "bf16.check_grad_overflow"}
    place = f"fp16.{name}" if name in LOSS_SCALE_KEYS else places.get(name)
    return f"overflow.{name}={said[name]!r}" + (f" ({place})" if place else "")


def _names(said: Given, names: list[str]) -> str:
    return ", ".join(_name(said, name) for name in names)


def _dynamic_keys(said: Given) -> list[str]:
    return [name for name in LOSS_SCALE_KEYS[1:] if name in said]


def _is_dynamic(said: Given, precision: str | None) -> bool:
    """Whether the loss scale is dynamic, as far as is known: in fp16 it is unless it is static."""
    if said.get("loss_scale"):
        return False
    return precision == "fp16" or (precision is None and ("loss_scale" in said or bool(_dynamic_keys(said))))


def _scaling_outside_fp16(said: Given, precision: str | None) -> Iterator[str]:
    names = [name for name in LOSS_SCALE_KEYS if name in said]
    if names and precision in ("fp32", "bf16"):
        scale, them = ("scales", "it") if len(names) == 1 else ("scale", "them")
        yield (
            f"{_names(said, names)} {scale} fp16 losses, but the precision is {precision}: leave {them} out, or train "
            "in fp16."
        )


def _static_with_dynamic(said: Given, precision: str | None) -> Iterator[str]:
    names = _dynamic_keys(said)
    if said.get("loss_scale") and names:
        are, them = ("is", "it") if len(names) == 1 else ("are", "them")
        yield (
            f"{_name(said, 'loss_scale')} is a static loss scale, but {_names(said, names)} {are} for dynamic loss "
            f"scaling: leave {them} out, or set overflow.loss_scale=0."
        )


def _fp16_without_check(said: Given, precision: str | None) -> Iterator[str]:
    if precision == "fp16" and said.get("check_grad_overflow") is False:
        yield (
            f"{_name(said, 'check_grad_overflow')} is not possible in fp16, whose loss scaling needs the check: leave "
            "it out, or train in bf16."
        )


def _policy_without_check(said: Given, precision: str | None) -> Iterator[str]:
    wanted = [name for name in ("on_overflow", "max_consecutive_skips") if said.get(name) not in (None, "skip")]
    check = said.get("check_grad_overflow")
    for name in wanted:
        if check is False:
            yield (
                f"{_name(said, name)} and {_name(said, 'check_grad_overflow')} disagree: without the check no overflow "
                "is seen. Turn it on, or leave the other out."
            )
        elif check is None and precision == "fp32":
            yield (
                f"{_name(said, name)} needs overflow.check_grad_overflow=true, which is off by default in fp32: turn "
                "it on, or leave both out."
            )


def _raise_with_limit(said: Given, precision: str | None) -> Iterator[str]:
    if said.get("on_overflow") == "raise" and "max_consecutive_skips" in said:
        yield (
            f"{_name(said, 'max_consecutive_skips')} and {_name(said, 'on_overflow')} disagree: no update is skipped "
            "where the first one raises. Leave one of them out."
        )


def _drop_with_dynamic_scale(said: Given, precision: str | None) -> Iterator[str]:
    if said.get("on_overflow") == "drop_request" and _is_dynamic(said, precision):
        yield (
            f"{_name(said, 'on_overflow')} and a dynamic loss scale (fp16.loss_scale=0, the default) disagree: an "
            "overflow says there that the scale is too large for all requests. Set a static overflow.loss_scale "
            "(fp16.loss_scale), or use 'skip'."
        )


def _smallest_above_first(said: Given, precision: str | None) -> Iterator[str]:
    power = said.get("initial_scale_power", _INITIAL_SCALE_POWER)
    smallest = said.get("min_loss_scale", _MIN_LOSS_SCALE)
    if not said.get("loss_scale") and smallest > 2.0**power:
        default = "" if "initial_scale_power" in said else ", the default"
        yield (
            f"{_name(said, 'min_loss_scale')} is above the first loss scale, {2**power} "
            f"(overflow.initial_scale_power={power}{default}): lower the one or raise the other."
        )


def _nothing_to_refill(said: Given, precision: str | None) -> Iterator[str]:
    if said.get("consecutive_hysteresis") and said.get("hysteresis") == 1:
        yield (
            f"{_name(said, 'consecutive_hysteresis')} and {_name(said, 'hysteresis')} disagree: a hysteresis of 1 "
            "tolerates no overflow, so nothing can be refilled. Leave one of them out."
        )


def _stops_before_scale_falls(said: Given, precision: str | None) -> Iterator[str]:
    most, hysteresis = said.get("max_consecutive_skips"), said.get("hysteresis", _HYSTERESIS)
    if most is not None and most <= hysteresis and _is_dynamic(said, precision):
        default = "" if "hysteresis" in said else ", the default"
        yield (
            f"{_name(said, 'max_consecutive_skips')} and overflow.hysteresis={hysteresis} (fp16.hysteresis{default}) "
            "disagree: the run would stop before a smaller loss scale has been tried. Allow at least "
            f"{hysteresis + 1} skips, or lower the hysteresis."
        )


_RULES = (
    _scaling_outside_fp16,
    _static_with_dynamic,
    _fp16_without_check,
    _policy_without_check,
    _raise_with_limit,
    _drop_with_dynamic_scale,
    _smallest_above_first,
    _nothing_to_refill,
    _stops_before_scale_falls,
)
