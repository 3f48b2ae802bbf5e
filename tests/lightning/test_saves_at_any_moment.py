"""Saves at moments that nobody has chosen, inside windows too: time limits, exceptions, signals, preemption."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, Timer

from requestzero.zero.window_checkpoint.record import SavedWindow
from support.lightning_data import rank
from support.lightning_parity import OURS, Net, data, trainer_of, weights
from support.lightning_runs import train
from support.lightning_spec import Run
from support.ranks import RankGroup

IN_SECOND_WINDOW = 5
"""Number of a batch in windows of four."""


class After(Callback):
    """Does something after a batch."""

    def __init__(self, batch: int = IN_SECOND_WINDOW) -> None:
        self.batch = batch

    def act(self, trainer: Trainer) -> None:
        raise NotImplementedError

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            self.act(trainer)


class TimeIsUp(After):
    """Lets the time of ``Trainer(max_time=...)`` be over on rank 0, which decides for all."""

    def act(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
            (timer,) = (each for each in callbacks if isinstance(each, Timer))
            timer._duration = 0.0


def timed(kind: str, batch: int, folder: str) -> tuple[list[str], int, list[float]]:
    """Files, updates and weights of a fit that the time ends after a batch."""
    saving = ModelCheckpoint(f"{folder}/{kind}", filename="{step}", save_top_k=-1, save_last=True)
    callbacks = [TimeIsUp(batch), saving]
    trainer = trainer_of(kind, max_time={"hours": 1}, accumulate_grad_batches=4, callbacks=callbacks)
    module = Net()
    trainer.fit(module, data())
    return sorted(os.listdir(f"{folder}/{kind}")), trainer.global_step, weights(module)


@pytest.mark.parametrize("batch", [IN_SECOND_WINDOW, 7])
def test_a_time_limit_ends_a_fit_as_under_ddp(two_ranks: RankGroup, tmp_path: Path, batch: int) -> None:
    """Inside a window, whose gradients DDP loses too, and at its end."""
    expected = two_ranks.run(timed, "ddp", batch, str(tmp_path))
    assert {updates for _, updates, _ in expected} == {1 if batch == IN_SECOND_WINDOW else 2}
    for kind in OURS:
        for (files, updates, found), plain in zip(
            two_ranks.run(timed, kind, batch, str(tmp_path)), expected, strict=True
        ):
            assert (files, updates) == plain[:2]
            assert found == pytest.approx(plain[2], rel=2e-5, abs=2e-5)


def test_a_time_limit_inside_a_request(two_ranks: RankGroup, tmp_path: Path) -> None:
    marks = [(number % 2 == 1, number % 6 == 5) for number in range(12)]
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    run = Run(marks=marks, callbacks=[TimeIsUp(8), saving], trainer={"max_time": {"hours": 1}})
    first, second = two_ranks.run(train, run)
    assert first["applied"] == second["applied"] == 1
    told = "discards an open update window of 3 micro-batches, 1 ended requests"
    assert any(told in text for text in first["warnings"])
    assert [path.name for path in tmp_path.iterdir()] == ["step=1.ckpt"]
    assert SavedWindow.read(tmp_path / "step=1.ckpt" / "checkpoint") is None


class Fails(After):
    def act(self, trainer: Trainer) -> None:
        raise RuntimeError("planned failure")


class Terminated(After):
    """One rank gets SIGTERM."""

    def act(self, trainer: Trainer) -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Preempted(After):
    """As users write it: a signal sets a flag, and after a batch all ranks save and stop if one has had it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path, self.asked = str(folder / "last.ckpt"), False

    def on_fit_start(self, *args: Any) -> None:
        self.previous = signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "asked", True))

    def on_fit_end(self, *args: Any) -> None:
        signal.signal(signal.SIGUSR1, self.previous)

    def act(self, trainer: Trainer) -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        if trainer.strategy.reduce_boolean_decision(self.asked, all=False):
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def on_exception(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", save_on_exception=True, **options)


def copied_when_it_fails(folder: Path) -> list[Callback]:
    return [on_exception(folder, save_last=True), Fails()]


def linked_when_it_fails(folder: Path) -> list[Callback]:
    return [on_exception(folder, save_last="link"), Fails()]


def by_another_callback(folder: Path) -> list[Callback]:
    return [OnExceptionCheckpoint(folder, "last"), Fails()]


def when_terminated(folder: Path) -> list[Callback]:
    return [on_exception(folder, save_last=True), Terminated()]


def when_preempted(folder: Path) -> list[Callback]:
    return [Preempted(folder)]


ENDS = [copied_when_it_fails, linked_when_it_fails, by_another_callback, when_terminated, when_preempted]


def ended(run: Run) -> str:
    """How a fit ends."""
    try:
        train(run)
    except (RuntimeError, SystemExit) as end:
        return type(end).__name__
    return "stopped"


@pytest.mark.parametrize("saved", ENDS)
def test_the_next_run_goes_on_in_the_window(
    two_ranks: RankGroup, tmp_path: Path, saved: Callable[[Path], list[Callback]]
) -> None:
    """The run that was ended and the one that resumes come to what an uninterrupted one does."""
    spec: dict[str, Any] = {"trainer": {"accumulate": 4, "max_epochs": 2}, "stateful": True}
    spec |= {"optimizer": "adamw", "model": "curved", "dropout": 0.25}
    expected = two_ranks.run(train, Run(**spec))
    ends = two_ranks.run(ended, Run(callbacks=saved(tmp_path), **spec))
    assert (
        ends[0]
        == ends[1]
        == {when_terminated: "SIGTERMException", when_preempted: "stopped"}.get(saved, "RuntimeError")
    )
    record = SavedWindow.read(tmp_path / "last.ckpt" / "checkpoint")
    assert record is not None
    assert record.ranks[0].requests == 2
    for want, got in zip(
        expected, two_ranks.run(train, Run(ckpt_path=str(tmp_path / "last.ckpt"), **spec)), strict=True
    ):
        assert len(got["updates"]) == 5
        assert got["updates"] == want["updates"][1:]
        assert [got[key] for key in ("weights", "optimizer", "global_step")] == [
            want[key] for key in ("weights", "optimizer", "global_step")
        ]
