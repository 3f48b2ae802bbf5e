"""Nested mappings, such as a DeepSpeed config, by keys whose parts are separated by dots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from requestzero.config.validation import as_mapping

Config = dict[str, Any]
"""A DeepSpeed config: sections and scalars by name."""

_ABSENT = object()


def look_up(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of ``key``, or ``default`` where there is none."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
    return default if value is _ABSENT else value


def put(config: Config, key: str, value: Any) -> None:
    """Set ``key``, and make the mappings on the way to it where they are missing."""
    *sections, name = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[name] = value


def pop(config: Config, key: str, default: Any = None) -> Any:
    """Remove ``key`` and return its value, or ``default`` where there is none."""
    section, _, name = key.rpartition(".")
    owner = look_up(config, section) if section else config
    return owner.pop(name, default) if isinstance(owner, dict) else default


def update(config: Config, values: Mapping[str, Any]) -> None:
    """Set everything that ``values`` holds, in place: the mappings within ``config`` stay the same objects."""
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(config.get(name), dict):
            update(config[name], value)
        else:
            config[name] = value


def section_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the section ``name`` of a DeepSpeed config, or an empty one where there is none.

    Raises:
        ValueError: it is no mapping.
    """
    value = config.get(name)
    return {} if value is None else as_mapping(name, value, advice="DeepSpeed wants a mapping there")
