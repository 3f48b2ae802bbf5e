"""Counts of updates that outlive their engine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from requestzero.zero.common.partition_traffic import PartitionTraffic
    from requestzero.zero.engine import RequestZeROEngine


@dataclass(frozen=True)
class UpdateCounts:
    """Counts of an engine at one moment, by the names that the engine has for them."""

    attempted_updates: int = 0
    applied_updates: int = 0
    skipped_updates: int = 0
    consecutive_skips: int = 0
    dropped_requests: int = 0
    aborted_requests: int = 0
    empty_updates: int = 0
    partition_traffic: PartitionTraffic | None = None

    @classmethod
    def of(cls, engine: RequestZeROEngine) -> UpdateCounts:
        """Read the counts of ``engine``; nothing is read from the device."""
        return cls(**{item.name: getattr(engine, item.name) for item in fields(cls)})
