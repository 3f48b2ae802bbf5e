"""Count what a piece of training does: the probe's counters, which the tests share."""

from __future__ import annotations

from requestzero.probe.counters import Allocations, Operators

__all__ = ["Allocations", "Operators"]
