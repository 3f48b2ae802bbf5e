"""What DeepSpeed says of the keys that it has removed from its config. DeepSpeed 0.19.6 has no such lists yet."""

from __future__ import annotations


def removed_sections() -> dict[str, str]:
    """Return a message by name of a section."""
    from deepspeed.runtime import config

    return getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})


def removed_zero_keys() -> dict[str, str]:
    """Return a message by key of ``zero_optimization``."""
    from deepspeed.runtime import config

    return getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", {})
