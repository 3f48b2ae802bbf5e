"""Devices of a configuration, known before any process starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

CPU_RANKS = 2
"""Ranks on a machine without GPUs, where the configuration does not say."""


@dataclass(frozen=True)
class Devices:
    """Lightning's ``accelerator`` (``"cpu"`` or ``"gpu"``), ranks per machine, and machines."""

    accelerator: str
    devices: int
    num_nodes: int

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes


def count_gpus() -> int:
    """Return the number of CUDA devices that this process sees."""
    import torch

    return torch.cuda.device_count()


def choose_devices(trainer: Any) -> Devices:
    """Return the devices of the ``trainer`` section, with ``auto`` and ``null`` resolved."""
    gpus = 0 if trainer.accelerator == "cpu" else count_gpus()
    accelerator = trainer.accelerator if trainer.accelerator != "auto" else "gpu" if gpus else "cpu"
    started = os.environ.get("LOCAL_WORLD_SIZE")  # by torchrun, which has decided
    default = int(started) if started else CPU_RANKS if accelerator == "cpu" else max(1, gpus)
    return Devices(accelerator, trainer.devices or default, trainer.num_nodes)
