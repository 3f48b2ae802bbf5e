"""Saving and resuming at updates."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from requestzero.zero.window_checkpoint.record import SavedWindow
from support.failures import assert_fails, failure
from support.lightning_data import MARKED, Stream, batch_value
from support.lightning_model import CurvedModel, Model
from support.lightning_records import ListLogger, Updates, optimizer_state, weights
from support.lightning_runs import build_trainer, train
from support.lightning_spec import Run
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER


class SaveInWindow(Callback):
    """Asks for a checkpoint after the second batch."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if args[2] == 1:
            trainer.save_checkpoint(os.path.join(trainer.default_root_dir, "inside.ckpt"))


class FailInWindow(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if args[2] == 5:
            raise RuntimeError("planned failure")


def periodic(directory: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(directory, filename="{step}", save_top_k=-1, every_n_train_steps=2, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1},
        {"stage": 2},
        {"stage": 2, "offload_optimizer": True, "grad_accum_dtype": "fp32"},
    ],
    ids=["stage1", "stage2", "stage2_offload"],
)
def test_resumed_run_is_identical(two_ranks: RankGroup, tmp_path: Path, options: dict[str, Any]) -> None:
    """AdamW on a curved loss with dropout, uneven requests; resumed in the middle of an epoch, at an update."""
    precision = "bf16-true" if options.get("offload_optimizer") else "32-true"
    options = {**options, "config": KEEP_OPTIMIZER}
    spec: dict[str, Any] = {
        "options": options,
        "trainer": {"max_epochs": 3, "precision": precision},
        "batches": 7,
        "marks": MARKED,
        "stateful": True,
        "optimizer": "adamw",
        "model": "curved",
        "dropout": 0.25,
    }
    whole = two_ranks.run(train, Run(callbacks=[periodic(tmp_path / "whole")], **spec))
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == [f"step={n}.ckpt" for n in (2, 4, 6, 8)]
    resumed = two_ranks.run(
        train,
        Run(callbacks=[periodic(tmp_path / "rest")], ckpt_path=str(tmp_path / "whole/step=4.ckpt"), **spec),
    )
    # No save within the first window after the resume.
    assert sorted(path.name for path in (tmp_path / "rest").iterdir()) == ["step=6.ckpt", "step=8.ckpt"]
    for want, got in zip(whole, resumed, strict=True):
        assert got["optimizer"] == want["optimizer"]
        assert got["updates"] == want["updates"][4:]
        assert got["seen"] == [item for item in want["seen"] if item[1] >= 10]
        assert [got[key] for key in ("weights", "global_step", "applied", "skipped")] == [
            want[key] for key in ("weights", "global_step", "applied", "skipped")
        ]
        assert got["logged"] == [row for row in want["logged"] if row[0] >= 4]


@pytest.mark.parametrize("where", ["epoch_end", "validation"])
def test_resume_at_an_epochs_end_and_after_validation(two_ranks: RankGroup, tmp_path: Path, where: str) -> None:
    """10 batches with windows of 4: the epoch's end follows a short window; validation is due inside one, after 6."""
    spec: dict[str, Any] = {
        "batches": 10,
        "stateful": True,
        "optimizer": "adamw",
        "model": "curved",
        "trainer": {"accumulate": 4, "max_epochs": 3},
    }
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    if where == "validation":
        spec |= {"validate": True, "trainer": {**spec["trainer"], "val_check_interval": 6}}
        saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, monitor="val_loss")
    whole = two_ranks.run(train, Run(callbacks=[saving], **spec))
    saved = sorted(path.name for path in tmp_path.iterdir())
    steps = [2, 5, 8] if where == "validation" else [3, 6, 9]
    assert saved == [f"step={step}.ckpt" for step in steps]
    resumed = two_ranks.run(train, Run(ckpt_path=str(tmp_path / saved[0]), **spec))
    for want, got in zip(whole, resumed, strict=True):
        assert got["updates"] == want["updates"][steps[0] :]
        assert got["optimizer"] == want["optimizer"]
        assert (got["global_step"], got["applied"]) == (want["global_step"], want["applied"]) == (9, 9)


def collate(items: list[int]) -> dict[str, Any]:
    return {"x": sum(batch_value(item, 0) for item in items), "index": items[0]}


def no_loss(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "x": 0.0 * inputs["x"]}


def train_on_requests(directory: str, ckpt_path: str | None = None) -> dict[str, Any]:
    """Train with the loader of this package: shuffled requests of 1 to 5 items, two to an update."""
    import torch

    from requestzero import RequestLoader

    torch.manual_seed(7)
    numbers = iter(range(100))
    requests = [[next(numbers) for _ in range(size)] for size in (3, 1, 5, 2, 4, 2, 1)]
    loader = RequestLoader(requests, collate, micro_batch_size=1, filler=no_loss, seed=3)
    run = Run(optimizer="adamw", trainer={"accumulate": 2, "max_epochs": 3, "max_steps": 10}, root=directory)
    updates = Updates()
    saving = ModelCheckpoint(directory, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    run.callbacks = [saving]
    trainer = build_trainer(run, ListLogger(), [updates, saving])
    model = CurvedModel(run)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return {
        "updates": updates.rows,
        "seen": model.seen,
        "weights": weights(model),
        "optimizer": optimizer_state(trainer),
        "counters": (trainer.global_step, trainer.current_epoch),
    }


@pytest.mark.parametrize("step", [2, 4, 6])
def test_resume_with_request_loader(two_ranks: RankGroup, tmp_path: Path, step: int) -> None:
    """After 2 and 6 updates in the middle of an epoch, after 4 at its end; the order of requests goes on, too."""
    whole = two_ranks.run(train_on_requests, str(tmp_path / "whole"))
    resumed = two_ranks.run(train_on_requests, str(tmp_path / "rest"), str(tmp_path / f"whole/step={step}.ckpt"))
    for want, got in zip(whole, resumed, strict=True):
        assert len(want["updates"]) == 10
        assert got["updates"] == want["updates"][step:]
        assert got["seen"] == want["seen"][len(want["seen"]) - len(got["seen"]) :]
        assert len(got["seen"]) < len(want["seen"])
        assert [got[key] for key in ("weights", "optimizer", "counters")] == [
            want[key] for key in ("weights", "optimizer", "counters")
        ]


def test_skipped_updates_are_counted_over_a_resume(two_ranks: RankGroup, tmp_path: Path) -> None:
    spec: dict[str, Any] = {
        "trainer": {"accumulate": 2, "max_epochs": 2},
        "stateful": True,
        "nan_batches": (2,),
        "options": {"overflow": {"check_grad_overflow": True}},
    }
    whole = two_ranks.run(train, Run(callbacks=[periodic(tmp_path)], **spec))
    resumed = two_ranks.run(train, Run(ckpt_path=str(tmp_path / "step=6.ckpt"), **spec))
    for want, got in zip(whole, resumed, strict=True):
        assert (want["skipped"], want["applied"], want["global_step"]) == (1, 11, 12)
        assert got["updates"] == want["updates"][6:]


def test_explicit_save_inside_a_request(two_ranks: RankGroup) -> None:
    message = r"inside a request would lose gradients that are not complete, 2 micro-batches, 0 ended requests"
    marks = [(number % 4 == 3, number % 4 == 3) for number in range(12)]
    assert_fails(two_ranks, message, train, Run(marks=marks, callbacks=[SaveInWindow]))


class SaveAfter(Callback):
    """Asks for a checkpoint after a batch, counted over all epochs."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint(os.path.join(trainer.default_root_dir, "inside.ckpt"))


@pytest.mark.parametrize(
    ("saved", "spec"),
    [
        (17, {"trainer": {"accumulate": 4}, "options": {"stage": 1, "normalization": "token"}, "weighted": True}),
        (
            17,
            {
                "trainer": {"accumulate": 4, "precision": "bf16-true", "gradient_clip_val": 0.5},
                "options": {"offload_optimizer": True, "grad_accum_dtype": "fp32", "config": KEEP_OPTIMIZER},
                "model": "curved",
                "dropout": 0.25,
                "optimizer": "adamw",
            },
        ),
        (16, {"trainer": {"accumulate": 4, "val_check_interval": 5}, "validate": True}),
        (16, {"manual": "every_third"}),
        (15, {"marks": [(number % 2 == 1, number % 6 == 5) for number in range(12)]}),
    ],
    ids=["token", "offload", "validation_waits", "manual", "marked"],
)
def test_resume_inside_a_window(two_ranks: RankGroup, tmp_path: Path, saved: int, spec: dict[str, Any]) -> None:
    """After a request in the middle of a window of the second epoch; where it validates, that was due there."""
    spec = {"stateful": True, **spec, "trainer": {"max_epochs": 3, **spec.get("trainer", {})}}
    whole = two_ranks.run(train, Run(callbacks=[SaveAfter(saved)], root=str(tmp_path), **spec))
    resumed = two_ranks.run(train, Run(ckpt_path=str(tmp_path / "inside.ckpt"), **spec))
    for want, got in zip(whole, resumed, strict=True):
        # The validation loader, which has no state, numbers its batches anew.
        seen = [[(name, index * (name == "train")) for name, index in each["seen"]] for each in (want, got)]
        assert seen[1] == seen[0][-len(seen[1]) :]
        assert 0 < len(got["updates"]) < len(want["updates"])
        assert got["updates"] == want["updates"][len(want["updates"]) - len(got["updates"]) :]
        for key in ("optimizer", "weights", "global_step", "applied", "attempted"):
            assert got[key] == want[key]


def test_explicit_save_at_an_update(two_ranks: RankGroup, tmp_path: Path) -> None:
    two_ranks.run(train, Run(trainer={"accumulate": 2}, callbacks=[SaveInWindow], root=str(tmp_path)))
    assert (tmp_path / "inside.ckpt" / "checkpoint").is_dir()


def test_save_by_time_waits_for_the_request(two_ranks: RankGroup, tmp_path: Path) -> None:
    """At all requests' ends: of two batches each, three to a window."""
    from datetime import timedelta

    callback = ModelCheckpoint(
        tmp_path, filename="{step}", save_top_k=-1, train_time_interval=timedelta(seconds=0), save_last=False
    )
    marks = [(number % 2 == 1, number % 6 == 5) for number in range(12)]
    two_ranks.run(train, Run(marks=marks, callbacks=[callback]))
    # One name for each step: the next save replaces it, the last in a window after its second request.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=0.ckpt", "step=1.ckpt", "step=2.ckpt"]
    windows = [SavedWindow.read(tmp_path / f"step={step}.ckpt" / "checkpoint") for step in range(3)]
    assert [window and window.ranks[0].requests for window in windows] == [2, 2, None]


def test_save_on_exception_holds_the_last_update(two_ranks: RankGroup, tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, filename="{step}", save_on_exception=True, save_last=False)
    spec = Run(trainer={"accumulate": 4}, callbacks=[callback, FailInWindow], stateful=True)
    assert two_ranks.run(failure, train, spec) == ["RuntimeError: planned failure"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step=1.ckpt"]


def evaluate_again(path: str, root: str) -> list[Any]:
    """Validate, test and predict with the checkpoint, in a Trainer that has never trained, then train and test."""
    run = Run(options={"stage": 2}, trainer={"max_epochs": 4}, root=root)
    trainer = build_trainer(run, ListLogger(), [])
    model = Model(run)
    validated = trainer.validate(
        model, Stream(Run(batches=2, marks=[(False, None)] * 2)), ckpt_path=path, verbose=False
    )
    loaded = weights(model)
    tested = trainer.test(model, Stream(Run(batches=2)), ckpt_path=path, verbose=False)
    predicted = trainer.predict(model, Stream(Run(batches=2)), ckpt_path=path)
    trainer.fit(model, Stream(Run(batches=4)), ckpt_path=path)
    after = weights(model)
    tested_again = trainer.test(model, Stream(Run(batches=2)), verbose=False)
    return [validated, tested, [float(value) for value in predicted], loaded, after, tested_again]


def test_evaluation_loads_the_weights(two_ranks: RankGroup, tmp_path: Path) -> None:
    trained = two_ranks.run(
        train,
        Run(options={"stage": 2}, trainer={"accumulate": 4}, callbacks=[ModelCheckpoint(tmp_path, "end")]),
    )
    for want, got in zip(
        trained, two_ranks.run(evaluate_again, str(tmp_path / "end.ckpt"), str(tmp_path)), strict=True
    ):
        validated, tested, predicted, loaded, after, tested_again = got
        assert loaded == want["weights"]
        assert validated == tested == [{"val_loss": pytest.approx(sum(predicted) / 2)}]
        assert after != loaded
        assert tested_again != tested


def evaluate_a_part() -> list[int]:
    """Number of batches that each loop takes of six."""
    limits = {"limit_val_batches": 1, "limit_test_batches": 2, "limit_predict_batches": 0.5}
    run = Run(trainer={**limits, "accumulate": 4}, batches=4)
    trainer = build_trainer(run, ListLogger(), [])
    model = Model(run)
    counts = []
    trainer.fit(model, Stream(run), Stream(Run(batches=6)))
    counts.append([name for name, _ in model.seen].count("validate"))
    for evaluate in (trainer.validate, trainer.test):
        model.seen = []
        evaluate(model, Stream(Run(batches=6)), verbose=False)
        counts.append(len(model.seen))
    predicted = trainer.predict(model, Stream(Run(batches=6)))
    return [*counts, len(predicted or []), trainer.global_step]


def test_limits_of_evaluation(one_rank: RankGroup) -> None:
    assert one_rank.run(evaluate_a_part) == [[1, 1, 2, 3, 1]]


def resume_with_foreign_random_states(directory: str) -> list[str]:
    """Train one epoch, then another from its checkpoint, which has the random states of two ranks; the warnings."""
    from unittest import mock

    from requestzero.lightning import rng

    spec: dict[str, Any] = {"batches": 4, "stateful": True, "schedule": False}
    collect = rng.collect
    with mock.patch.object(rng, "collect", lambda device: collect(device) * 2):
        train(Run(callbacks=[ModelCheckpoint(directory, "end")], **spec))
    result = train(Run(trainer={"max_epochs": 2}, ckpt_path=f"{directory}/end.ckpt", **spec))
    return list(result["warnings"])


def test_random_states_of_another_number_of_ranks(one_rank: RankGroup, tmp_path: Path) -> None:
    texts = one_rank.run(resume_with_foreign_random_states, str(tmp_path))[0]
    assert any("holds the random states of 2 ranks and this run has 1" in text for text in texts)
