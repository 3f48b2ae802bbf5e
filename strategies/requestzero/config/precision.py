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


def precision_of(config: Mapping[str, Any]) -> str:
    """Return what the sections of a DeepSpeed config turn on: ``"fp16"``, ``"bf16"`` or ``"fp32"``.

    Raises:
        ValueError: one of them is no mapping.
    """
    return next((name for name in ("fp16", "bf16") if section_of(config, name).get("enabled") is True), "fp32")


def counts(section: Mapping[str, Any], name: str, precision: str | None) -> bool:
    """Return false where a section ``fp16`` or ``bf16`` is switched off, so that it says nothing.

    Args:
        section: a section that says ``"auto"`` counts in its own precision.
        name: ``"fp16"`` or ``"bf16"``.
        precision: the model's dtype; ``None`` where it is not known yet.
    """
    enabled = section.get("enabled", True)
    return bool(name == precision if enabled == "auto" else enabled)
