"""A progress bar that counts updates, not batches."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from requestzero.recipes.update_metrics import running_strategy

PLAIN_LINES = 10
"""Lines of progress in a run whose output is not a terminal."""


class UpdateProgress(Callback):
    """Shows updates, requests, loss, gradient norm, skipped updates and dropped requests, on the first rank only.

    Where the output is not a terminal, about ten plain lines are printed instead of a bar.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress: Progress | None = None
        self.shown = 0
        """The update shown last."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.shown = trainer.global_step
        if not trainer.is_global_zero or not self.console.is_terminal:
            return
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[metrics]}"))
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self.progress = Progress(TextColumn("updates"), *columns, *times, console=self.console)
        self.progress.start()
        self.progress.add_task("updates", total=trainer.max_steps, completed=trainer.global_step, metrics="")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        metrics = trainer.progress_bar_metrics
        if not trainer.is_global_zero or trainer.global_step == self.shown:
            return
        self.shown = trainer.global_step
        strategy = running_strategy(trainer)
        text = f"requests {metrics['requests']:.0f}  loss {metrics['loss']:.3f}  grad norm {strategy.grad_norm:.3f}"
        text += f"  skipped {strategy.skipped_updates}  dropped {strategy.dropped_requests}"
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], completed=trainer.global_step, metrics=text)
        elif trainer.global_step == 1 or trainer.global_step % max(1, trainer.max_steps // PLAIN_LINES) == 0:
            self.console.print(f"update {trainer.global_step}/{trainer.max_steps}  {text}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
