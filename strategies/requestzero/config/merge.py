"""Put several places that say something about one configuration together: none outranks another silently."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from requestzero.config.nested import Config
from requestzero.config.translation import AUTO, KEYS_WITH_AUTO


@dataclass(frozen=True)
class Source:
    """One place, and the keys that it sets."""

    place: str
    """How messages name it: ``"config"``, ``"the arguments of RequestZeRO"``."""
    config: Config
    preposition: str = "in"
    """Word before ``place`` in messages."""

    def __str__(self) -> str:
        return f"{self.preposition} {self.place}"


def merge(*sources: Source) -> Config:
    """Return all keys of all sources in a new dictionary.

    ``"auto"`` gives way to a value from elsewhere, unless it is one of the key's own values.

    Raises:
        ValueError: a key has two different values; the message names the key, both values and both places.
    """
    return _merge([(str(source), source.config) for source in sources], "")


def _merge(given: list[tuple[str, Any]], prefix: str) -> Config:
    merged: Config = {}
    for name in dict.fromkeys(name for _, config in given for name in config):
        key = f"{prefix}{name}"
        values = [(where, config[name]) for where, config in given if name in config]
        said = [(where, value) for where, value in values if value != AUTO or key in KEYS_WITH_AUTO] or values[:1]
        if all(isinstance(value, Mapping) for _, value in said):
            merged[name] = _merge(said, f"{key}.")
        else:
            merged[name] = copy.deepcopy(_agreed(key, said))
    return merged


def _agreed(key: str, said: list[tuple[str, Any]]) -> Any:
    (where, value), *others = said
    for other_where, other in others:
        if other != value or isinstance(other, bool) != isinstance(value, bool):
            raise ValueError(
                f"{key} is {value!r} {where} and {other!r} {other_where}: set it in one place, or to the same value."
            )
    return value


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> Config:
    """Return a copy of ``base``, such as defaults, in which the values of ``top`` win."""
    result = copy.deepcopy(dict(base))
    for name, value in top.items():
        if isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = overlay(result[name], value)
        else:
            result[name] = copy.deepcopy(value)
    return result
