"""Keys of ours in a DeepSpeed config: DeepSpeed would refuse them or pass over them, so they are taken out for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from requestzero.config.nested import Config, section_of
from requestzero.config.rules import LOSS_SCALE_KEYS
from requestzero.config.settings import OWN_OVERFLOW_KEYS, OverflowSettings, check_retain
from requestzero.config.suggestion import did_you_mean

RETAIN_OPTION = "retain_gpu_grad_partition_until_step"
RETAIN_KEY = f"zero_optimization.{RETAIN_OPTION}"

OWN_SECTION = "requestzero"
OWN_SECTION_OPTIONS = ("rank_agreement", "rank_dependent_parameters")

OVERFLOW_SECTION = "overflow"
"""For the overflow options that have no place upstream."""

CHECK = "check_grad_overflow"
_OVERFLOW_KEYS = (*OWN_OVERFLOW_KEYS, CHECK)


def take_retain_option(config: Config) -> bool | str:
    """Remove ``zero_optimization.retain_gpu_grad_partition_until_step`` from ``config`` and return its value.

    DeepSpeed's own schema does not know the key yet and would reject it.

    Raises:
        ValueError: the value is neither a bool nor ``"auto"``.
    """
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or RETAIN_OPTION not in zero:
        return False
    value: bool | str = zero.pop(RETAIN_OPTION)
    check_retain(RETAIN_KEY, value)
    return value


def take_own_section(config: Config) -> Config:
    """Remove the section ``requestzero`` from ``config`` and return what it sets, by the options' names.

    Raises:
        ValueError: it is no mapping, or holds a key that does not exist or a value that is not a bool.
    """
    section = section_of(config, OWN_SECTION)
    config.pop(OWN_SECTION, None)
    for name, value in section.items():
        if name not in OWN_SECTION_OPTIONS:
            near = did_you_mean(str(name), OWN_SECTION_OPTIONS)
            raise ValueError(f"{OWN_SECTION}.{name} is no option: use {' or '.join(OWN_SECTION_OPTIONS)}.{near}")
        if not isinstance(value, bool):
            raise ValueError(f"{OWN_SECTION}.{name}={value!r} is not allowed: use true or false.")
    return dict(section)


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
        if key not in _OVERFLOW_KEYS:
            raise ValueError(
                f"overflow.{key} in {source} is no overflow option: use one of {', '.join(_OVERFLOW_KEYS)}."
                f"{did_you_mean(str(key), [item.name for item in fields(OverflowSettings)])}"
            )
    try:
        for key, value in section.items():
            OverflowSettings(**{key: value})
    except ValueError as error:
        raise ValueError(f"In {source}: {error}") from error
