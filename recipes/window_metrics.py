"""Counts of a plain loop: sums over the run, which go on when it is resumed, and the mean loss of a window."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from requestzero.recipes.run_totals import RunTotals


@dataclass
class LoopTotals(RunTotals):
    """Counts of a run, for ``accelerator.register_for_checkpointing``."""

    updates: int = 0
    """Attempted updates."""

    def add(self, window: Any, loss_sum: float, tokens: float) -> None:
        """Count one window; ``loss_sum`` and ``tokens`` are over all ranks."""
        self.updates += 1
        self.requests += window.requests
        self.micro_batches += window.micro_batches
        self.add_loss(loss_sum, tokens)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


class WindowLoss:
    """Sum of losses and number of trained tokens since the last :meth:`take`, on this rank."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, loss_sum: Tensor, tokens: Tensor) -> None:
        """Add the sum of the losses of ``tokens`` tokens."""
        self._sums += torch.stack([loss_sum.detach(), tokens]).double()

    def take(self) -> Tensor:
        """Return ``[sum of losses, tokens]``, and start anew."""
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return taken
