"""Lightning: a rank that runs out of data, fails or leaves a batch out, and what all ranks may do."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from typing import Any

import pytest

from support.lightning_data import Stream, rank
from support.lightning_model import Model
from support.lightning_records import ListLogger
from support.lightning_runs import build_trainer
from support.lightning_spec import Run
from support.polling import polling_every
from support.ranks import RankGroup

MARKED: list[tuple[bool, bool | None]] = [(False, None), (True, None)] * 4


class NoneOnOne(Model):
    """Lightning refuses this on more than one rank, on the rank where it happens."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 and rank() == 1 else loss


class RaisesOnOne(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and rank() == 1:
            raise ValueError("no such token")
        return super().training_step(batch, batch_idx)


class RaisesOnAll(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError(f"no such token on rank {rank()}")


class BrokenStream(Stream):
    """Its loader raises on rank 1, at batch 3 of the run: within a request where they have two batches."""

    def _batch(self, index: int) -> Any:
        if index == 3 and rank() == 1:
            raise OSError("the disk is gone")
        return super()._batch(index)


class LateStream(Stream):
    """Raises on rank 1 at a request's start."""

    def _batch(self, index: int) -> Any:
        if index == 4 and rank() == 1:
            raise OSError("the disk is gone")
        return super()._batch(index)


def fit(model: type[Model], run: Run, stream: type[Stream] = Stream, shorter: int = 0) -> tuple[str, float, int]:
    """The error of a fit on this rank, its seconds, and the updates; rank 1 has ``shorter`` batches fewer."""
    run = dataclasses.replace(run, schedule=False, batches=run.batches - shorter * rank())
    trainer = build_trainer(run, ListLogger(), [])
    start, error = time.monotonic(), ""
    try:
        with polling_every(0.2):
            trainer.fit(model(run), stream(run))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, time.monotonic() - start, trainer.global_step


WINDOWS = Run(batches=8, marks=MARKED, trainer={"accumulate": 2})
PLAIN = Run(batches=4)
STAGE_1 = dataclasses.replace(WINDOWS, options={"stage": 1})
ALONE: list[tuple[type[Model], Run, type[Stream], int, str]] = [
    (Model, PLAIN, Stream, 1, "rank 1: has no more data after micro-batch 1 of request no. 3"),
    (Model, WINDOWS, BrokenStream, 0, "rank 1: failed after micro-batch 1 of request 'r2': OSError: the disk is gone"),
    (Model, STAGE_1, BrokenStream, 0, "rank 1: failed after micro-batch 1 of request 'r2': OSError: the disk is gone"),
    (Model, WINDOWS, LateStream, 0, "rank 1: failed after micro-batch 2 of request 'r2': OSError: the disk is gone"),
    (RaisesOnOne, WINDOWS, Stream, 0, "rank 1: failed .*ValueError: no such token"),
    (RaisesOnOne, STAGE_1, Stream, 0, "rank 1: failed .*ValueError: no such token"),
    (NoneOnOne, PLAIN, Stream, 0, "rank 1: failed .*returning None"),
]


@pytest.mark.parametrize(("model", "run", "stream", "shorter", "message"), ALONE)
def test_one_rank_alone(
    two_fresh_ranks: RankGroup, model: type[Model], run: Run, stream: type[Stream], shorter: int, message: str
) -> None:
    results = two_fresh_ranks.run(fit, model, run, stream, shorter, timeout=60.0)
    assert len({error for error, _, _ in results}) == 1, results
    assert results[0][0].startswith("RankDisagreementError: "), results
    assert re.search(message, results[0][0]), results
    assert max(seconds for _, seconds, _ in results) < 10


def test_what_all_ranks_do(two_ranks: RankGroup) -> None:
    for run in (PLAIN, WINDOWS):
        assert [error for error, _, _ in two_ranks.run(fit, Model, run)] == ["", ""]
    errors = [error for error, _, _ in two_ranks.run(fit, RaisesOnAll, PLAIN)]
    assert errors == [f"ValueError: no such token on rank {i}" for i in range(2)]


class TerminatedAlone(Model):
    """Rank 1 gets SIGTERM in its forward, while rank 0 comes to its reduction."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def fit_terminated(run: Run) -> tuple[str, int]:
    """The end of a fit on this rank, and its batches."""
    trainer = build_trainer(dataclasses.replace(run, schedule=False), ListLogger(), [])
    try:
        trainer.fit(TerminatedAlone(run), Stream(run))
    except SystemExit as end:
        return type(end).__name__, trainer.fit_loop.epoch_loop.batch_idx
    return "trained", trainer.fit_loop.epoch_loop.batch_idx


def test_sigterm_on_one_rank_ends_all_ranks_before_the_next_batch(two_fresh_ranks: RankGroup) -> None:
    """Lightning's handler waits for rank 0, which waits for this rank."""
    results = two_fresh_ranks.run(fit_terminated, PLAIN, timeout=60.0)
    assert {end for end, _ in results} == {"SIGTERMException"}, results
    assert len({batch for _, batch in results}) == 1


class ActsAlone(Model):
    """Rank 0 does something in a hook that all ranks have to do: a mistake that waits for ever elsewhere."""

    action = ""

    def on_train_batch_end(self, *args: Any) -> None:
        if args[2] == 1 and rank() == 0:
            strategy = self.trainer.strategy
            if self.action == "saves a checkpoint":
                self.trainer.save_checkpoint("/nowhere/x.ckpt")
            elif self.action == "saves weights":
                self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/x.ckpt", weights_only=True)
            elif self.action == "loads":
                strategy.load_checkpoint("/nowhere/x.ckpt")
            elif self.action == "broadcasts":
                strategy.broadcast("value")
            else:
                strategy.barrier("mine")


ACTIONS = {
    "saves a checkpoint": "rank 0: saves a checkpoint after",
    "saves weights": "rank 0: waits in barrier Trainer.save_checkpoint after",
    "loads": "rank 0: loads a checkpoint after",
    "broadcasts": "rank 0: waits in a broadcast after",
    "barrier": "rank 0: waits in barrier mine after",
}


@pytest.mark.parametrize("action", ACTIONS)
def test_one_rank_acts_alone(two_fresh_ranks: RankGroup, action: str) -> None:
    results = two_fresh_ranks.run(fit_alone, action, timeout=60.0)
    assert len({error for error, _, _ in results}) == 1, results
    assert results[0][0].startswith("RankDisagreementError: "), results
    assert ACTIONS[action] in results[0][0], results
    assert max(seconds for _, seconds, _ in results) < 10


def fit_alone(action: str) -> tuple[str, float, int]:
    ActsAlone.action = action
    return fit(ActsAlone, PLAIN)
