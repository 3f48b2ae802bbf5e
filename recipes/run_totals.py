"""Counts of a run, over all its parts where it is resumed; the same in both recipes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class RunTotals:
    """Counts of a run, which go on when it is resumed."""

    requests: int = 0
    micro_batches: int = 0
    """Per rank."""
    tokens: int = 0
    """Trained tokens over all ranks."""
    first_loss: float = math.nan
    """Mean loss of the first update window, in nats per trained token."""
    last_loss: float = math.nan

    def add_loss(self, loss_sum: float, tokens: float) -> None:
        """Count a window's trained tokens and note its mean loss; both numbers are over all ranks."""
        self.tokens += int(tokens)
        self.last_loss = loss_sum / max(1.0, tokens)
        if math.isnan(self.first_loss):
            self.first_loss = self.last_loss

    def counts(self) -> dict[str, int]:
        """Return the counts that are logged at every update."""
        return {name: getattr(self, name) for name in ("requests", "micro_batches", "tokens")}
