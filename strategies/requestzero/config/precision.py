"""Names of precisions, and the one that a DeepSpeed config turns on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from requestzero.config.nested import section_of

PRECISIONS = {
    "32-true": "fp32",
    "bf16-true": "bf16",
    "bf16-mixed": "bf16",
    "16-true": "fp16",
    "16-mixed": "fp16",
}
"""Lightning's name of a precision -> the model's dtype, as DeepSpeed names its section."""

SECTIONS = ("fp16", "bf16")
"""Sections of a DeepSpeed config that turn a precision on."""


def precision_of(config: Mapping[str, Any]) -> str:
    """Return what the sections of a DeepSpeed config turn on: ``"fp16"``, ``"bf16"`` or ``"fp32"``.

    Raises:
        ValueError: one of them is no mapping.
    """
    return next((name for name in SECTIONS if section_of(config, name).get("enabled") is True), "fp32")


def counts(config: Mapping[str, Any], section: str, precision: str | None) -> bool:
    """Return false where ``section`` is one of a precision and is switched off, so that it says nothing.

    Args:
        config: a DeepSpeed config. A section that says ``enabled: auto`` counts in its own precision.
        section: the section's name.
        precision: the model's dtype; ``None`` where it is not known yet.
    """
    if section not in SECTIONS:
        return True
    enabled = section_of(config, section).get("enabled", True)
    return bool(section == precision if enabled == "auto" else enabled)
