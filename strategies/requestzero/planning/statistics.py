"""What a plan costs, and what naive splitting would have cost: running sums, a few numbers for any dataset."""

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
    """Each window's load of its busiest rank."""
    mean: float = 0.0
    """Each window's mean load of the ranks."""

    @property
    def imbalance(self) -> float:
        """How much more the busiest rank carries than the mean: 0.05 is 5 %."""
        return self.busiest / self.mean - 1 if self.mean else 0.0

    def padding(self, tokens: int) -> float:
        """Share of the computed tokens that is padding, where ``tokens`` are real."""
        return 1 - tokens / self.computed if self.computed else 0.0

    def __add__(self, other: Cost) -> Cost:
        return _sum(self, other)


@dataclass(frozen=True)
class PlanStatistics:
    """Sums over the windows that were handed out."""

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
    """In order, a fixed count per rank, padded."""

    def __add__(self, other: PlanStatistics) -> PlanStatistics:
        return _sum(self, other)

    def state(self) -> dict[str, object]:
        """As plain numbers, for a state dict."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PlanStatistics:
        """The inverse of :meth:`state`."""
        return cls(**{**state, "planned": Cost(**state["planned"]), "naive": Cost(**state["naive"])})


def _plain(value: object) -> object:
    return vars(value).copy() if isinstance(value, Cost) else value


def _sum(one: T, other: T) -> T:
    return type(one)(*(getattr(one, item.name) + getattr(other, item.name) for item in fields(one)))
