"""Nested mappings, such as a DeepSpeed config, by keys whose parts are separated by dots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]
"""A DeepSpeed config: sections and scalars by name."""

_ABSENT = object()


def put(config: Config, key: str, value: Any) -> None:
    """Set ``key``, and make the mappings on the way to it where they are missing."""
    *sections, name = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[name] = value


def look_up(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of ``key``, or ``default`` where there is none."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
    return default if value is _ABSENT else value


def section_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the section ``name`` of a DeepSpeed config, or an empty one where there is none.

    Raises:
        ValueError: it is no mapping.
    """
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r} is not allowed: DeepSpeed wants a mapping there.")
    return value
