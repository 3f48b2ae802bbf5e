"""Counts of copies between gradients on the accelerator and host gradients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PartitionTraffic:
    """Copies between gradient partitions and host gradients on this rank; one partition is one group's."""

    publications: int = 0
    """Partitions that were copied to the host gradient."""
    published_bytes: int = 0
    """Bytes of the host gradient that those copies wrote."""
    restores: int = 0
    """Partitions that were copied back, early or not."""
    restored_bytes: int = 0
    """Bytes of the host gradient that those copies read."""
    early_restores: int = 0
    """Those of :attr:`restores` that began before the first reduction of their request."""
    kept: int = 0
    """Partitions that stayed on the device at a request's end."""
    released: int = 0
    """Partitions that were freed at a request's end."""
