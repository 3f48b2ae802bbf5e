"""Our options as keys of a DeepSpeed config, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from requestzero.config.nested import Config, look_up, put
from requestzero.config.option_record import options_of
from requestzero.config.options import OWNERS
from requestzero.config.precision import counts

AUTO = "auto"
"""The value by which a config leaves a key to others, unless it is one of the key's own values."""

KEYS_WITH_AUTO = frozenset(
    key for owner in OWNERS for option in options_of(owner).values() if option.rule.accepts(AUTO) for key in option.keys
)
"""Keys of which ``"auto"`` is a value like others."""


def to_config(owner: type, values: Mapping[str, Any], precision: str | None = None) -> Config:
    """Return the DeepSpeed keys of options.

    Args:
        owner: the class that declares the options.
        values: their values by name; ``None`` is not given. What is no option or has no key is left out.
        precision: the model's dtype, ``"fp32"``, ``"bf16"`` or ``"fp16"``; ``None``: the keys of all of them, such as
            to compare them with a config.
    """
    config: Config = {}
    for name, option in options_of(owner).items():
        if values.get(name) is not None:
            for key in option.keys_in(precision):
                put(config, key, option.to_key(values[name]))
    return config


def from_config(owner: type, config: Mapping[str, Any], precision: str | None = None) -> dict[str, Any]:
    """Return the values of the options that a DeepSpeed config sets, by name.

    What stands in a section ``fp16`` or ``bf16`` that is switched off is for another precision, and says nothing; nor
    does ``"auto"``, unless it is a value of the option.

    Args:
        owner: the class that declares the options.
        config: a DeepSpeed config.
        precision: the model's dtype; ``None`` where it is not known yet.
    """
    found: dict[str, Any] = {}
    for name, option in options_of(owner).items():
        for key in option.keys:
            value = look_up(config, key)
            left_open = value is None or (value == AUTO and key not in KEYS_WITH_AUTO)
            if not left_open and counts(config, key.partition(".")[0], precision):
                found[name] = option.from_key(value)
    return found
