"""Keys of ours in a DeepSpeed config: DeepSpeed would refuse them or skip them, so they are removed for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from requestzero.config.nested import Config, look_up, pop, put, section_of
from requestzero.config.option_record import OWN_SECTIONS, Option, options_of
from requestzero.config.options import OWNERS, OverflowSettings
from requestzero.config.suggestion import did_you_mean
from requestzero.config.validation import as_mapping

_ABSENT = object()


def own_names(section: str) -> tuple[str, ...]:
    """Return the names of our keys in a section of a DeepSpeed config."""
    return tuple(key.removeprefix(f"{section}.") for key, _ in _own_keys() if key.startswith(f"{section}."))


def pop_own_keys(config: Config) -> Config:
    """Remove our keys from a DeepSpeed config and return them, in their sections."""
    own = {name: config.pop(name) for name in OWN_SECTIONS if name in config}
    for key, _ in _own_keys():
        value = pop(config, key, _ABSENT)
        if value is not _ABSENT:
            put(own, key, value)
    return own


def without_own_keys(config: Config) -> Config:
    """Return a copy of a DeepSpeed config that DeepSpeed can read."""
    theirs = copy.deepcopy(config)
    pop_own_keys(theirs)
    return theirs


def check_own_keys(config: Mapping[str, Any], source: str) -> None:
    """Raise ValueError where a section of ours is no mapping, a key in it does not exist, or a value is not allowed.

    Args:
        config: a DeepSpeed config.
        source: its place, for messages.
    """
    _check_overflow_names(config, source)
    _check_own_names(config, source)
    for key, option in _own_keys():
        value = look_up(config, key, _ABSENT)
        text = None if value is _ABSENT else option.problem(value, key)
        if text is not None:
            raise ValueError(f"In {source}: {text}")


def _own_keys() -> Iterator[tuple[str, Option]]:
    for owner in OWNERS:
        for option in options_of(owner).values():
            yield from ((key, option) for key in option.own_keys)


def _check_overflow_names(config: Mapping[str, Any], source: str) -> None:
    section = config.get("overflow", {})
    options = options_of(OverflowSettings)
    names = sorted(own_names("overflow"), key=lambda name: len(options[name].keys))  # those of every precision first
    for name in as_mapping("overflow", section, given=f"overflow={section!r} in {source}"):
        if name in names:
            continue
        if name in options:
            elsewhere = options[name].keys[0]
            raise ValueError(f"overflow.{name} in {source} has its own place in a DeepSpeed config: use {elsewhere}.")
        raise ValueError(
            f"overflow.{name} in {source} is no overflow option: use one of {', '.join(names)}."
            f"{did_you_mean(str(name), options)}"
        )


def _check_own_names(config: Mapping[str, Any], source: str) -> None:
    names = own_names("requestzero")
    for name in section_of(config, "requestzero"):
        if name not in names:
            near = did_you_mean(str(name), names)
            raise ValueError(f"In {source}: requestzero.{name} is no option: use {' or '.join(names)}.{near}")
