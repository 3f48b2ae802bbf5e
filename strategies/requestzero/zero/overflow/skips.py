"""The record of an engine's updates beside DeepSpeed's counters: skips, loss scales, dropped requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from requestzero.data.micro_batch import RequestId

LOSS_SCALES_KEPT = 100
SKIPS_KEPT = 20


@dataclass(frozen=True)
class SkippedUpdate:
    """One update that was attempted and not applied, because its gradient was not finite."""

    update: int
    """Its number among the attempted updates, from 1."""
    cause: str
    """``"inf"`` or ``"NaN"``, as the norm over all ranks was."""
    request_ids: tuple[RequestId, ...]
    """Names of the window's requests, in order; ``None`` for one without a name."""
    loss_scale_before: float
    """The loss scale of this window's backwards (1 outside fp16)."""
    loss_scale_after: float
    """The loss scale of the next window's backwards."""

    def describe(self) -> str:
        """Return one line about it, for logs and errors."""
        scale = f"{self.loss_scale_before:g}"
        if self.loss_scale_after != self.loss_scale_before:
            scale += f", then {self.loss_scale_after:g}"
        return f"update {self.update} ({self.cause}; {name_requests(self.request_ids)}; loss scale {scale})"


def name_requests(request_ids: tuple[RequestId, ...], most: int = 8) -> str:
    """Return ``requests 'a', 7, unnamed``: the first ``most`` of them, and how many more there are."""
    names = ["unnamed" if each is None else repr(each) for each in request_ids[:most]]
    more = [f"{len(request_ids) - most} more"] if len(request_ids) > most else []
    return f"request{'s' if len(request_ids) > 1 else ''} {', '.join([*names, *more])}"


@dataclass
class SkipRecord:
    """Counts beside DeepSpeed's ``global_steps`` and ``skipped_steps``, the same on all ranks."""

    consecutive: int = 0
    """Updates that were skipped since the last one that was applied."""
    dropped_requests: int = 0
    """Requests that were left out of their window's update."""
    aborted_requests: int = 0
    """Requests that ``abort_request`` has left out."""
    empty: int = 0
    """Windows that were left out because their total weight was zero."""
    recent: deque[SkippedUpdate] = field(default_factory=lambda: deque(maxlen=SKIPS_KEPT))
    """The last skipped updates."""
    loss_scales: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LOSS_SCALES_KEPT))
    """The last changes of the loss scale: updates attempted before the first one with this scale, and the scale."""

    def note_scale(self, attempted: int, scale: float) -> None:
        """Note the scale after so many attempted updates, if it is another than before."""
        if not self.loss_scales or self.loss_scales[-1][1] != scale:
            self.loss_scales.append((attempted, scale))

    def note_skip(self, skip: SkippedUpdate) -> None:
        """Count one more skipped update."""
        self.consecutive += 1
        self.recent.append(skip)

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers, so that a checkpoint can be read without this package."""
        return {
            "consecutive": self.consecutive,
            "dropped_requests": self.dropped_requests,
            "aborted_requests": self.aborted_requests,
            "empty": self.empty,
            "recent": [asdict(skip) for skip in self.recent],
            "loss_scales": list(self.loss_scales),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SkipRecord:
        """Return the record that :meth:`state_dict` gave; an empty one for an empty mapping (DeepSpeed's own)."""
        counts = ("consecutive", "dropped_requests", "aborted_requests", "empty")
        record = cls(**{name: state.get(name, 0) for name in counts})
        record.recent.extend(SkippedUpdate(**skip) for skip in state.get("recent", ()))
        record.loss_scales.extend((attempted, scale) for attempted, scale in state.get("loss_scales", ()))
        return record
