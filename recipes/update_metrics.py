"""Metrics of each update window and of the run, over all ranks."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from requestzero import RequestZeRO
from requestzero.recipes.run_totals import RunTotals


@dataclass
class RankFigures:
    """Measurements of this process; a resumed run starts anew."""

    seconds: float = 0.0
    """From the start of training to the end of the last update."""
    tokens: int = 0
    """Trained tokens over all ranks in that time."""
    bytes_between_requests: int = 0
    """Bytes of this rank's gradient partition after a request within a window, the largest."""
    bytes_at_peak: int = 0
    updates_applied: int = 0
    """Over the whole training, as the two following."""
    updates_skipped: int = 0
    requests_dropped: int = 0


class UpdateMetrics(Callback):
    """Logs ``loss``, ``lr``, ``requests``, ``micro_batches`` and ``tokens`` once per update.

    The loss is the mean over the window's trained tokens on all ranks, before the update. The strategy adds
    ``grad_norm`` and ``overflow/...``.
    """

    def __init__(self) -> None:
        self.totals = RunTotals()
        self.figures = RankFigures()
        self._loss_and_tokens = [torch.zeros(()), torch.zeros(())]
        self._started = 0.0
        self._rate = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clear_window()
        self._started = time.perf_counter()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        window = running_strategy(trainer).engine.update_window
        self.totals.requests += window.requests + window.request_open
        self.totals.micro_batches += window.micro_batches
        self._rate = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = running_strategy(trainer)
        loss_sum, tokens = outputs["loss_sum"], outputs["tokens"]
        self._loss_and_tokens = [self._loss_and_tokens[0] + loss_sum, self._loss_and_tokens[1] + tokens]
        if not strategy.window_open:
            self._on_update(strategy, pl_module)
        elif not strategy.engine.update_window.request_open:
            held = strategy.engine.grad_partition_bytes
            self.figures.bytes_between_requests = max(self.figures.bytes_between_requests, held)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = running_strategy(trainer)
        self.figures.updates_applied = strategy.applied_updates
        self.figures.updates_skipped = strategy.skipped_updates
        self.figures.requests_dropped = strategy.dropped_requests
        held = [float(self.figures.bytes_between_requests), float(strategy.engine.peak_grad_partition_bytes)]
        most = strategy.reduce(torch.tensor(held, dtype=torch.float64, device=strategy.root_device), reduce_op="max")
        self.figures.bytes_between_requests, self.figures.bytes_at_peak = map(int, most.tolist())

    def _on_update(self, strategy: Any, pl_module: LightningModule) -> None:
        sums = torch.stack([value.double() for value in self._loss_and_tokens])
        loss_sum, tokens = strategy.reduce(sums, reduce_op="sum").tolist()
        self._clear_window()
        totals = self.totals
        totals.add_loss(loss_sum, tokens)
        self.figures.tokens += int(tokens)
        self.figures.seconds = time.perf_counter() - self._started
        counts = {name: float(count) for name, count in totals.counts().items()}
        pl_module.log_dict({"loss": totals.last_loss, "lr": self._rate, **counts}, prog_bar=True)

    def _clear_window(self) -> None:
        self._loss_and_tokens = [torch.zeros(()), torch.zeros(())]

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.totals)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.totals = RunTotals(**state_dict)


def running_strategy(trainer: Trainer) -> Any:
    """Return the trainer's ``RequestZeRO`` within fit, where it has an engine."""
    assert isinstance(trainer.strategy, RequestZeRO)
    return trainer.strategy
