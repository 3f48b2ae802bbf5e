"""SIGTERM inside a request: all ranks end at the request's end, with a checkpoint from which a run goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from requestzero.zero.window_checkpoint.record import SavedWindow
from support.lightning_data import rank
from support.lightning_runs import train
from support.lightning_spec import Run
from support.ranks import RankGroup

REQUEST, SIGNALLED = 3, 7
"""Batches of a request, of which a window has two; the batch after which the signal comes, inside a request."""


class Terminate(Callback):
    """Sends the signal to one rank alone."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == SIGNALLED and rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def job(folder: str, stage: int, terminated: bool, resumes: bool) -> dict[str, Any] | str:
    run = Run(
        options={"stage": stage},
        marks=[(number % REQUEST == REQUEST - 1, None) for number in range(12)],
        trainer={"accumulate": 2, "max_epochs": 2},
        stateful=True,
        optimizer="adamw",
        model="curved",
        dropout=0.25,
        ckpt_path=f"{folder}/step=1.ckpt" if resumes else None,
    )
    if terminated:
        saving = ModelCheckpoint(folder, filename="{step}", save_on_exception=True, save_last=False)
        run.callbacks = [Terminate, saving]
    try:
        return train(run)
    except SystemExit as end:
        return type(end).__name__


@pytest.mark.parametrize("stage", [2, 3])
def test_the_run_goes_on_where_the_signal_has_ended_it(two_ranks: RankGroup, stage: int, tmp_path: Path) -> None:
    whole = two_ranks.run(job, str(tmp_path), stage, False, False)
    assert two_ranks.run(job, str(tmp_path), stage, True, False, timeout=60.0) == ["SIGTERMException"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step=1.ckpt"]
    record = SavedWindow.read(tmp_path / "step=1.ckpt" / "checkpoint")
    assert record is not None
    assert (record.ranks[0].requests, record.ranks[0].micro_batches) == (1, REQUEST)
    for want, got in zip(whole, two_ranks.run(job, str(tmp_path), stage, False, True), strict=True):
        assert got["seen"] == want["seen"][SIGNALLED + 2 :]
        assert got["updates"] == want["updates"][1:]
        assert got["weights"] == want["weights"]
