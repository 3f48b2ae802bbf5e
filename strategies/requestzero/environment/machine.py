"""The environment of a measurement or diagnosis: versions, accelerator, backend, processors."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from requestzero._version import __version__

PACKAGES = ("torch", "deepspeed", "lightning", "accelerate", "transformers")
"""Distributions whose versions matter here."""


@dataclass(frozen=True)
class Machine:
    """Versions and hardware, as one process sees them."""

    versions: dict[str, str | None]
    """Version by name: Python, requestzero and ``PACKAGES``; ``None`` for a package that is not installed."""
    accelerator: str
    """DeepSpeed's name of the accelerator: ``"cuda"``, ``"cpu"``, ..."""
    device: str
    """The accelerator's name, such as ``"NVIDIA H100 80GB HBM3"``; the processor's on the CPU."""
    backend: str
    """Backend of the ranks' communication: ``"nccl"``, ``"gloo"``, ..."""
    cpu: str
    """The processor's name."""
    cpus: int
    """Logical processors that this process may use."""
    ranks: int
    """Data-parallel ranks of the run."""

    def rows(self) -> dict[str, str]:
        """Return the description as label -> text, in the order to be shown."""
        return {
            **{name: version or "not installed" for name, version in self.versions.items()},
            "accelerator": f"{self.accelerator} ({self.device})",
            "communication backend": self.backend,
            "processor": f"{self.cpu}, {self.cpus} usable",
            "ranks": str(self.ranks),
        }


def describe_machine(ranks: int = 1) -> Machine:
    """Return the environment of this process. Loads DeepSpeed, which chooses the accelerator, and starts nothing.

    Args:
        ranks: data-parallel ranks of the run.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    kind = accelerator.device_name()
    return Machine(
        versions=installed_versions(),
        accelerator=kind,
        device=_cpu_name() if kind == "cpu" else _device_name(kind),
        backend=accelerator.communication_backend_name(),
        cpu=_cpu_name(),
        cpus=len(os.sched_getaffinity(0)),
        ranks=ranks,
    )


def installed_versions() -> dict[str, str | None]:
    """Return versions by package name without importing any; ``None`` where a package is missing."""
    return {
        "Python": platform.python_version(),
        "requestzero": __version__,
        **{name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _device_name(accelerator: str) -> str:
    import torch

    module: Any = getattr(torch, accelerator, None)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else accelerator


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()  # ARM's list has no names
