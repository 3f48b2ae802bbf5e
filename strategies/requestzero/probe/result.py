"""The result of a probe: one row for every engine of every configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from requestzero.environment.machine import Machine
from requestzero.probe.grid import Configuration, Engine

Value = Any
"""A number, ``None``, or a list of numbers."""


@dataclass
class Row:
    """One engine in one configuration."""

    configuration: Configuration
    engine: Engine
    values: dict[str, Value] = field(default_factory=dict)
    """Measured values by name; the largest of any rank. ``reference.py`` adds ``..._reference`` to some."""
    errors: dict[str, str] = field(default_factory=dict)
    """Measurement -> ``"TypeError: ..."`` where the engine cannot run it."""
    note: str = ""

    def record(self) -> dict[str, Any]:
        """Return a flat record for files: the configuration's fields, the engine, then values and errors."""
        return {
            **vars(self.configuration),
            "engine": "requestzero" if self.engine.requestzero else "stock",
            "retain": self.engine.retain,
            "note": self.note,
            **self.values,
            **{f"{name}_error": text for name, text in self.errors.items()},
        }


@dataclass(frozen=True)
class Result:
    """A whole run."""

    options: dict[str, Any]
    machine: Machine
    rows: list[Row]


def most(by_rank: Sequence[Value]) -> Value:
    """Return the largest values over ranks, element by element."""
    if isinstance(by_rank[0], list):
        return [max(each) for each in zip(*by_rank, strict=True)]
    return max(by_rank)
