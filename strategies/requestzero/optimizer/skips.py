"""What an engine remembers of its updates: attempted, applied, skipped, and how the loss scale went."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

LOSS_SCALES_KEPT = 100
SKIPS_KEPT = 20


@dataclass(frozen=True)
class SkippedUpdate:
    """One update that was attempted and not applied, because its gradient was not finite."""

    update: int
    """Its number among the attempted updates, from 1."""
    cause: str
    """``"inf"`` or ``"NaN"``."""
    request_ids: tuple[str | int | None, ...]
    """Names of the window's requests, in order; ``None`` for one without a name."""
    loss_scale_before: float
    """What this window's losses were multiplied by (1 outside fp16)."""
    loss_scale_after: float
    """What the next window's losses are multiplied by."""


@dataclass
class SkipRecord:
    """Counts beside DeepSpeed's ``global_steps`` and ``skipped_steps``, the same on all ranks."""

    consecutive: int = 0
    """Updates that were skipped since the last one that was applied."""
    dropped_requests: int = 0
    """Requests that were left out of their window's update."""
    recent: deque[SkippedUpdate] = field(default_factory=lambda: deque(maxlen=SKIPS_KEPT))
    """The last skipped updates."""
    loss_scales: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LOSS_SCALES_KEPT))
    """The last changes of the loss scale: updates attempted before the first one with this scale, and the scale."""
