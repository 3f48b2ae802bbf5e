"""Configurations in which DeepSpeed builds its own Adam for the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from requestzero.config.nested import look_up

_ADAMS = ("adam", "adamw")


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    """Return true if the optimizer step runs on the CPU."""
    return look_up(config, "zero_optimization.offload_optimizer.device") not in (None, "none")


def builds_cpu_adam(config: Mapping[str, Any]) -> bool:
    """Return true if DeepSpeed makes ``DeepSpeedCPUAdam`` of the section ``optimizer``.

    Args:
        config: a DeepSpeed config. An optimizer that the caller builds is not in it.
    """
    name = look_up(config, "optimizer.type")
    torch_adam = look_up(config, "optimizer.params.torch_adam")
    return offloads_optimizer(config) and str(name).lower() in _ADAMS and not torch_adam
