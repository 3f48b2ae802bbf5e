"""Costs of a plan and of the naive split that it is compared with, as running sums."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

T = TypeVar("T", bound="Cost | PlanStatistics")


@dataclass(frozen=True)
class Cost:
    """Sums over windows of one way to split requests."""

    computed: int = 0
    """Tokens that the model computes, padding included and fillers not."""
    micro_batches: int = 0
    """On all ranks, fillers included."""
    fillers: int = 0
    busiest: float = 0.0
    """Sum of each window's load of its busiest rank."""
    mean: float = 0.0
    """Sum of each window's mean load of the ranks."""

    @property
    def imbalance(self) -> float:
        """Excess of the busiest rank's load over the mean: 0.05 is 5 %."""
        return self.busiest / self.mean - 1 if self.mean else 0.0

    def padding(self, tokens: int) -> float:
        """Return the share of the computed tokens that is padding, where ``tokens`` are none."""
        return 1 - tokens / self.computed if self.computed else 0.0

    def __add__(self, other: Cost) -> Cost:
        return _sum(self, other)


@dataclass(frozen=True)
class PlanStatistics:
    """Sums over the windows that a loader has yielded."""

    windows: int = 0
    requests: int = 0
    sequences: int = 0
    tokens: int = 0
    """Without padding."""
    skipped_requests: int = 0
    """Left out as a whole."""
    skipped_texts: int = 0
    """Left out of requests, those of skipped requests not counted unless they were bad themselves."""
    truncated_texts: int = 0
    planned: Cost = Cost()
    naive: Cost = Cost()
    """The same requests in order, a fixed number of sequences per rank, padded."""

    def __add__(self, other: PlanStatistics) -> PlanStatistics:
        return _sum(self, other)

    def state(self) -> dict[str, object]:
        """Return the sums as plain numbers, for a state dict."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PlanStatistics:
        """Return the statistics of what :meth:`state` has returned."""
        return cls(**{**state, "planned": Cost(**state["planned"]), "naive": Cost(**state["naive"])})


def _plain(value: object) -> object:
    return vars(value).copy() if isinstance(value, Cost) else value


def _sum(one: T, other: T) -> T:
    return type(one)(*(getattr(one, item.name) + getattr(other, item.name) for item in fields(one)))
