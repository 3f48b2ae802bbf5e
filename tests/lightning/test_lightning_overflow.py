"""Gradients that are not finite under Lightning: policies, counters, schedulers, and what the loggers get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from requestzero.probe.counters import Operators
from support.failures import failure
from support.lightning_reference import reference
from support.lightning_runs import train
from support.lightning_spec import Run
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER

CHECK = {"check_grad_overflow": True}
DROP = {**CHECK, "on_overflow": "drop_request"}
NAMES = {
    "grad_norm",
    "overflow/skipped_updates",
    "overflow/consecutive",
    "overflow/dropped_requests",
    "requests/aborted",
    "overflow/loss_scale",
}


def run_of(overflow: dict[str, Any], nan_batches: tuple[int, ...], **changes: Any) -> Run:
    """Windows of two requests; the learning rate is halved after every second update."""
    trainer = {"accumulate": 2, "max_epochs": 2, **changes.pop("trainer", {})}
    return Run(
        options={"overflow": overflow, **changes.pop("options", {})},
        trainer=trainer,
        **changes,
        nan_batches=nan_batches,
    )


def logged(result: dict[str, Any], name: str) -> list[float]:
    return [row[name] for _, row in result["logged"] if name in row]


@pytest.mark.parametrize("offload", [False, True])
def test_skipped_updates_hold_the_schedule_and_are_logged(two_ranks: RankGroup, offload: bool) -> None:
    """Windows 2 and 3 of 6 are skipped."""
    options = {"offload_optimizer": offload, "config": KEEP_OPTIMIZER}
    run = run_of(CHECK, (2, 5), batches=6, options=options)
    for got in two_ranks.run(train, run):
        assert [row["weights"] for row in got["updates"]] == reference([[0, 1], [], [], [6, 7], [8, 9], [10, 11]])
        assert [row["lr"] for row in got["updates"]] == [0.5, 0.5, 0.5, 0.25, 0.25, 0.125]
        assert (got["applied"], got["skipped"], got["global_step"]) == (4, 2, 6)
        if got["rank"] == 0:
            assert logged(got, "overflow/skipped_updates") == [0, 1, 2, 2, 2, 2]
            assert logged(got, "overflow/consecutive") == [0, 1, 2, 0, 0, 0]
            assert logged(got, "overflow/loss_scale") == [1] * 6
            norms = [row["norm"] for row in got["updates"]]
            assert logged(got, "grad_norm") == norms
            assert norms[1:3] == [float("inf")] * 2


def test_dropped_requests_leave_the_mean(two_ranks: RankGroup) -> None:
    """Of window 2 a request is dropped, of window 4 both are: that one is skipped, and the schedule waits."""
    for got in two_ranks.run(train, run_of(DROP, (2, 6, 7), batches=6)):
        assert [row["weights"] for row in got["updates"]] == reference([[0, 1], [3], [4, 5], [], [8, 9], [10, 11]])
        assert [row["lr"] for row in got["updates"]] == [0.5, 0.25, 0.25, 0.25, 0.125, 0.125]
        assert (got["applied"], got["skipped"], got["dropped"]) == (5, 1, 3)
        if got["rank"] == 0:
            assert logged(got, "overflow/dropped_requests") == [0, 1, 1, 3, 3, 3]
            assert logged(got, "overflow/consecutive") == [0, 0, 0, 1, 0, 0]


def test_raise_and_too_many_skips_end_the_run_on_all_ranks(two_ranks: RankGroup) -> None:
    for overflow, nan_batches, text in (
        ({**CHECK, "on_overflow": "raise"}, (3,), "GradientOverflowError: The gradient is not finite in update 2 (NaN"),
        ({**CHECK, "max_consecutive_skips": 2}, (2, 5), "GradientOverflowError: 2 updates in a row were skipped"),
    ):
        first, second = two_ranks.run(failure, train, run_of(overflow, nan_batches, batches=6))
        assert first == second
        assert text in first


def test_counters_and_schedule_after_a_resume(two_ranks: RankGroup, tmp_path: Path) -> None:
    """Saved after the third update: one skipped, a request dropped, one skip in a row."""
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=3)
    spec: dict[str, Any] = {"stateful": True, "batches": 12, "trainer": {"max_epochs": 1}}
    whole = two_ranks.run(train, run_of(DROP, (1, 4, 5, 9), callbacks=[saving], **spec))
    resumed = two_ranks.run(train, run_of(DROP, (1, 4, 5, 9), ckpt_path=str(tmp_path / "step=3.ckpt"), **spec))
    for want, got in zip(whole, resumed, strict=True):
        assert got["updates"] == want["updates"][3:]
        for name in ("applied", "skipped", "dropped", "attempted", "consecutive"):
            assert got[name] == want[name], name
        assert (got["applied"], got["skipped"], got["dropped"], got["attempted"]) == (5, 1, 4, 6)
        assert repr(got["logged"]) == repr([row for row in want["logged"] if row[0] >= 3])  # a loss is NaN


def test_every_n_steps_and_only_what_is_wanted(two_ranks: RankGroup) -> None:
    every_second = two_ranks.run(train, run_of(CHECK, (), batches=8, trainer={"max_epochs": 1, "log_every_n_steps": 2}))
    assert [(step, set(row) >= NAMES) for step, row in every_second[0]["logged"]] == [(1, True), (3, True)]
    off = two_ranks.run(train, run_of(CHECK, (), batches=4, options={"log_metrics": False}))
    assert all(not NAMES & set(row) for _, row in off[0]["logged"])
    assert off[0]["logged"]
    assert two_ranks.run(train, run_of(CHECK, (), batches=4, trainer={"logger": False}))[0]["logged"] == []


def test_manual_optimization_and_validation(two_ranks: RankGroup) -> None:
    run = run_of(CHECK, (), batches=6, manual="every_third", validate=True, trainer={"accumulate": 1, "max_epochs": 1})
    rows = [row for _, row in two_ranks.run(train, run)[0]["logged"]]
    assert [set(row) >= NAMES for row in rows] == [True, True, False]
    assert set(rows[-1]) == {"val_loss"}


class Own(Callback):
    """A user's metric by the name of one of ours, and what the others see."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        module.log("grad_norm", 17.0)
        self.seen.append(float(trainer.callback_metrics.get("overflow/skipped_updates", -1)))


def train_with_own(run: Run) -> tuple[list[float], list[float], list[float]]:
    own = Own()
    run.callbacks.append(own)
    result = train(run)
    return logged(result, "grad_norm"), logged(result, "overflow/skipped_updates"), own.seen


def test_a_users_metric_of_the_same_name_is_left(two_ranks: RankGroup) -> None:
    norms, skips, seen = two_ranks.run(train_with_own, run_of(CHECK, (1,), batches=4, trainer={"max_epochs": 1}))[0]
    assert norms == [17.0, 17.0]
    assert skips == [1, 1]
    assert seen == [-1, 1, 1, 1]


def reads(log_metrics: bool, nan_batches: tuple[int, ...]) -> int:
    """Host reads of a whole run that logs nothing before its end, with the gradient norm left on the device."""
    options = {"log_metrics": log_metrics, "grad_accum_dtype": "fp32"}
    trainer = {"precision": "bf16-true", "log_every_n_steps": 1000, "max_epochs": 1}
    run = run_of({"check_grad_overflow": False}, nan_batches, batches=8, options=options, trainer=trainer)
    with Operators() as operators:
        train(run)
    return operators.host_reads


def test_nothing_is_read_before_it_is_logged(two_ranks: RankGroup) -> None:
    assert two_ranks.run(reads, True, ()) == two_ranks.run(reads, False, ())
