"""Several places that each say something about the DeepSpeed config: put together, nothing outranks silently."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from requestzero.config.deepspeed_config import RETAIN_OPTION, Config

AUTO = "auto"
"""The value by which a config leaves a key to others; of ``RETAIN_OPTION`` it is a value like others."""


@dataclass(frozen=True)
class Source:
    """One place, as messages name it, and the DeepSpeed keys that it sets."""

    place: str
    config: Config


def put(config: Config, key: str, value: Any) -> None:
    """Set ``key``, whose parts are separated by dots, in nested mappings."""
    *sections, name = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[name] = value


def look_up(config: Mapping[str, Any], key: str) -> Any:
    """The value of ``key``, whose parts are separated by dots; ``None`` where there is none."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def merge_sources(sources: Sequence[Source]) -> Config:
    """All keys of all sources in a new config. ``"auto"`` gives way to a value from elsewhere.

    Raises:
        ValueError: a key has two different values; the message names the key, both values and both places.
    """
    return _merge([(source.place, source.config) for source in sources], "")


def _merge(given: list[tuple[str, Any]], prefix: str) -> Config:
    merged: Config = {}
    for key in dict.fromkeys(key for _, config in given for key in config):
        values = [(place, config[key]) for place, config in given if key in config]
        said = [(place, value) for place, value in values if value != AUTO or key == RETAIN_OPTION] or values[:1]
        if all(isinstance(value, Mapping) for _, value in said):
            merged[key] = _merge(said, f"{prefix}{key}.")
        else:
            merged[key] = copy.deepcopy(_agreed(f"{prefix}{key}", said))
    return merged


def _agreed(key: str, said: list[tuple[str, Any]]) -> Any:
    (place, value), *others = said
    for other_place, other in others:
        if other != value or isinstance(other, bool) != isinstance(value, bool):
            raise ValueError(
                f"{key} is {value!r} in {place} and {other!r} in {other_place}: set it in one place, or to the same "
                "value."
            )
    return value


def places_of(sources: Sequence[Source], key: str) -> str:
    """Where a value of ``key`` stands, for messages."""
    places = [source.place for source in sources if look_up(source.config, key) not in (None, AUTO)]
    return " and ".join(places) or "the plugin's DeepSpeed config"
