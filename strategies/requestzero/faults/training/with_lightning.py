"""The training with Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from requestzero.faults.combination import RANKS, Point
from requestzero.faults.setup import CLIPPING
from requestzero.faults.training.job import Job, Rank
from requestzero.faults.training.parts import (
    Model,
    make_loader,
    make_optimizer,
    refuse_bad,
    watch_engine,
    watch_files,
)
from requestzero.lightning.strategy import RequestZeRO


class Module(pl.LightningModule):
    """The model as a LightningModule."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.model, self._rank = Model(rank.injector), rank
        self._loss = rank.injector.at(Point.FORWARD, self.model)

    @override
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        refuse_bad(batch)
        return self._loss(batch)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self, self._rank.injector)


class Strategy(RequestZeRO):
    """The strategy, with points in its engine, which is there before a checkpoint is loaded."""

    def __init__(self, rank: Rank, **options: Any) -> None:
        super().__init__(**options)
        self._rank = rank

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self._rank.journal.engine = self.engine
        watch_engine(self._rank.injector, self.engine, "set_gradient_accumulation_boundary")


class Notes(pl.Callback):
    """Notes the requests and updates of this rank, and saves within windows."""

    def __init__(self, job: Job, rank: Rank) -> None:
        self._job, self._journal = job, rank.journal

    @override
    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._journal.started(self._job.start, trainer.strategy.applied_updates)  # type: ignore[attr-defined]

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.strategy.request_open:  # type: ignore[attr-defined]
            return
        job, journal = self._job, self._journal
        journal.request_ended()
        journal.updated(trainer.strategy.engine)  # type: ignore[attr-defined]
        if job.saves_at(journal.place) and not job.ends_window(journal.place):
            trainer.save_checkpoint(job.folder / f"step={job.name_at(journal.place)}.ckpt")
            journal.saved()


class NotingCheckpoint(ModelCheckpoint):
    """Saves after every update, and notes it."""

    def __init__(self, rank: Rank, **options: Any) -> None:
        super().__init__(**options)
        self._journal = rank.journal

    @override
    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self._journal.saved()


def train(job: Job, rank: Rank) -> None:
    """Train until ``job.until``, from the start or from a checkpoint."""
    watch_files(rank.injector)
    saves = NotingCheckpoint(rank, dirpath=job.folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = pl.Trainer(
        strategy=Strategy(rank, config=job.setup.config()),
        gradient_clip_val=CLIPPING,
        precision="bf16-true" if job.setup.is_half else "32-true",
        accelerator="cpu",
        devices=RANKS,
        max_steps=job.until,
        max_epochs=1,
        callbacks=[Notes(job, rank), saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    trainer.fit(Module(rank), make_loader(rank.injector, job.setup), ckpt_path=job.checkpoint)
    if not rank.journal.has_started:  # the checkpoint was that of a whole run
        rank.journal.started(job.start, job.until)
