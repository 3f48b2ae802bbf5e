"""Values that a program sets in a plugin after it was built: in its public config, or as attributes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from requestzero.accelerate.options import argument_source
from requestzero.config.changes import changed_keys, with_only
from requestzero.config.merge import Source
from requestzero.config.nested import Config
from requestzero.config.option_record import options_of
from requestzero.config.options import OverflowSettings, RequestZeROSettings

CONFIG_PLACE = "the plugin's deepspeed_config, as set after the plugin was built,"
ATTRIBUTES_PLACE = "the plugin's attributes, as set after the plugin was built,"

_READ_ONCE = ("options",)


@dataclass(frozen=True)
class Changes:
    """What was set since the plugin was built."""

    sources: list[Source]
    keys: list[str]
    """Keys of a DeepSpeed config that were set or removed; no other place counts for them any more."""
    without_keys: dict[str, Any]
    """Options that have no key, by name."""

    def __bool__(self) -> bool:
        return bool(self.keys or self.without_keys)


def find_changes(
    configs: tuple[Config, Config], own: Config, arguments: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> Changes:
    """Return what has changed.

    Args:
        configs: the public DeepSpeed config as the plugin has left it, and as it is now, both without our own keys.
        own: our own keys, where they were put into the public config.
        arguments: the plugin's fields by name as it has left them, and as they are now.

    Raises:
        ValueError: a field was set that is read only when the plugin is built, or that does not apply.
    """
    before, after = arguments
    changed = {name: after[name] for name in after if after[name] is not None and after[name] != before[name]}
    for name in _READ_ONCE:
        if name in changed:
            raise ValueError(
                f"{name} of a RequestZeROPlugin was set after the plugin was built, which reads it only then: give it "
                "to RequestZeROPlugin(...), or change the plugin's deepspeed_config."
            )
    attributes = argument_source({**dict.fromkeys(after), **changed}).config
    keys = changed_keys(*configs)
    in_config = with_only(configs[1], keys)
    sources = [Source(CONFIG_PLACE, in_config), Source(CONFIG_PLACE, own), Source(ATTRIBUTES_PLACE, attributes)]
    sources = [Source(source.place, copy.deepcopy(source.config)) for source in sources if source.config]
    return Changes(
        sources=sources,
        keys=[*keys, *(key for config in (own, attributes) for key in changed_keys({}, config))],
        without_keys=_without_keys(changed),
    )


def _without_keys(changed: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: changed[name] for name, option in options_of(RequestZeROSettings).items() if name in changed}
    found = {name: value for name, value in own.items() if not options_of(RequestZeROSettings)[name].keys}
    if "overflow" in changed:
        found["overflow"] = OverflowSettings.build(changed["overflow"])
    return found
