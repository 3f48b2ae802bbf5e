"""Differences between two states of one configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from requestzero.config.nested import Config, look_up, pop, put

_ABSENT = object()


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the keys, parts separated by dots, whose value is another one, new, or gone."""
    keys = dict.fromkeys([*_leaves(before), *_leaves(after)])
    return [key for key in keys if _differ(look_up(before, key, _ABSENT), look_up(after, key, _ABSENT))]


def with_only(config: Mapping[str, Any], keys: Iterable[str]) -> Config:
    """Return a new config with those of the ``keys`` that ``config`` has."""
    result: Config = {}
    for key in keys:
        value = look_up(config, key, _ABSENT)
        if value is not _ABSENT:
            put(result, key, value)
    return result


def without(config: Mapping[str, Any], keys: Iterable[str]) -> Config:
    """Return a new config without the ``keys``; values are shared."""
    result = {name: without(value, ()) if isinstance(value, Mapping) else value for name, value in config.items()}
    for key in keys:
        pop(result, key)
    return result


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _differ(one: Any, other: Any) -> bool:
    """Return true for values that are not the same; a section compares by its keys, each by itself."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return False
    return one is not other and (one != other or isinstance(one, bool) != isinstance(other, bool))
