"""Gradients that are not finite in a loop with Accelerate and in Trainer: policies, counters, schedules, trackers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker

from support.accelerate_loops import Loop, data, prepare, train, weights
from support.accelerate_state import fresh
from support.failures import assert_fails
from support.models import WIDTH, LossOfRowWeight
from support.ranks import RankGroup
from support.trainer import quiet, with_documented_line

CHECK = {"check_grad_overflow": True}
DROP = {**CHECK, "on_overflow": "drop_request"}


def reference(windows: list[list[int]], batches: int) -> list[list[float]]:
    """Plain PyTorch: the weights after each update with the mean gradient of these micro-batches; none, no update."""
    weight = torch.nn.Parameter(torch.zeros(WIDTH))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    rows, after = data(batches, 2).view(batches, 2, WIDTH), []
    for window in windows:
        if window:
            weight.grad = rows[window].flatten(0, 1).mean(0)
            optimizer.step()
            schedule.step()
        after.append(weight.tolist())
    return after


@pytest.mark.parametrize("stage", [2, 3])
def test_dropped_requests_leave_the_mean(two_ranks: RankGroup, stage: int) -> None:
    """Every ``accumulate`` block is a request. Of window 2 one is dropped, of window 3 both are."""
    for ours in two_ranks.run(train, Loop(plugin={"zero_stage": stage, "overflow": DROP}, n=2, nan_at=(3, 4, 5))):
        assert [update["weights"] for update in ours["updates"]] == reference([[0, 1], [2], [], [6, 7]], 8)
        assert [update["lr"] for update in ours["updates"]] == [0.25, 0.125, 0.125, 0.0625]
        assert [update["skipped"][0] for update in ours["updates"]] == [False, False, True, False]
        assert ours["metrics"]["overflow/dropped_requests"] == 3
        assert ours["metrics"]["overflow/skipped_updates"] == 1


def test_the_norm_before_the_step_is_without_what_was_dropped(two_ranks: RankGroup) -> None:
    kept = data(4, 2).view(4, 2, WIDTH)[[0, 1, 3]].flatten(0, 1).mean(0)
    for ours in two_ranks.run(train, Loop(plugin={"overflow": DROP}, n=4, batches=4, nan_at=(2,), clip=float("inf"))):
        assert ours["updates"][0]["norm"] == pytest.approx(float(kept.norm()), rel=1e-6)
        assert ours["updates"][0]["weights"] == pytest.approx((-0.5 * kept).tolist(), rel=1e-6)


@pytest.mark.parametrize(
    ("overflow", "nan_at", "message"),
    [
        ({**CHECK, "on_overflow": "raise"}, (2,), "The gradient is not finite in update 2 "),
        ({**CHECK, "max_consecutive_skips": 2}, (2, 5), "2 updates in a row were skipped"),
    ],
)
def test_what_ends_the_run(two_ranks: RankGroup, overflow: Any, nan_at: tuple[int, ...], message: str) -> None:
    message = f"^GradientOverflowError: {message}"
    assert_fails(two_ranks, message, train, Loop(plugin={"overflow": overflow}, n=2, nan_at=nan_at))


# --- trackers -------------------------------------------------------------------------------------------------------


class ListTracker(GeneralTracker):
    """Keeps what is logged."""

    name = "list"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> Any:
        return self.rows

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.rows.append((step, dict(values)))


def log(plugin: dict[str, Any]) -> list[tuple[int | None, dict[str, Any]]]:
    """Two windows, the second of which is skipped; logged after each of four micro-batches, and once more."""
    with fresh():
        tracker = ListTracker()
        loop = Loop(plugin=plugin, n=2, batches=4, accelerator={"log_with": tracker})
        accelerator, model, optimizer, loader, _ = prepare(loop)
        accelerator.init_trackers("test")
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch * (float("nan") if index == 2 else 1)))
                optimizer.step()
                optimizer.zero_grad()
            accelerator.log({"loss": float(index)}, step=index)
        accelerator.log({"grad_norm": -1.0})
        return tracker.rows


def test_trackers_get_the_metrics_once_after_every_update(two_ranks: RankGroup) -> None:
    rows, others = two_ranks.run(log, {"overflow": CHECK})
    norm = float(data(4, 2)[:4].mean(0).norm())
    of_first = {
        "overflow/skipped_updates": 0,
        "overflow/consecutive": 0,
        "overflow/dropped_requests": 0,
        "requests/aborted": 0,
        "overflow/loss_scale": 1,
        "grad_norm": pytest.approx(norm, rel=1e-6),
    }
    of_second = {**of_first, "overflow/skipped_updates": 1, "overflow/consecutive": 1, "grad_norm": float("inf")}
    assert rows == [
        (0, {"loss": 0}),
        (1, {"loss": 1, **of_first}),
        (2, {"loss": 2}),
        (3, {"loss": 3, **of_second}),
        (None, {"grad_norm": -1}),
    ]
    assert others == []
    assert two_ranks.run(log, {"overflow": CHECK, "options": {"log_metrics": False}})[0] == [
        *((index, {"loss": index}) for index in range(4)),
        (None, {"grad_norm": -1}),
    ]


# --- save and resume ------------------------------------------------------------------------------------------------


def resumable(first: int, last: int, load: str | None, save: str | None) -> list[Any]:
    """Windows ``first`` to ``last`` of two micro-batches; what is known after each. NaN in micro-batches 1, 4 and 5."""
    with fresh():
        accelerator, model, optimizer, _, scheduler = prepare(Loop(plugin={"overflow": DROP}, n=2))
        plugin, rows = accelerator.deepspeed_plugin, data(12, 2).view(12, 2, WIDTH)
        if load is not None:
            accelerator.load_state(load)
        seen: list[Any] = []
        for index in range(2 * first, 2 * last):
            poison = float("nan") if index in (1, 4, 5) and accelerator.process_index == 1 else 1.0
            with accelerator.accumulate(model):
                accelerator.backward(model(rows[index, accelerator.process_index][None] * poison))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rate = optimizer.param_groups[0]["lr"]
                seen.append((weights(accelerator, model), rate, plugin.metrics(accelerator)))
                if save is not None and index == 5:
                    accelerator.save_state(save)
        return seen


def test_counters_and_schedule_after_a_resume(two_ranks: RankGroup, tmp_path: Path) -> None:
    whole = two_ranks.run(resumable, 0, 6, None, str(tmp_path / "state"))
    resumed = two_ranks.run(resumable, 3, 6, str(tmp_path / "state"), None)
    for want, got in zip(whole, resumed, strict=True):
        assert got == want[3:]
        assert [row[1] for row in want] == [0.25, 0.125, 0.125, 0.0625, 0.03125, 0.015625]
        assert [row[2]["overflow/consecutive"] for row in want] == [0, 0, 1, 0, 0, 0]
        assert want[-1][2]["overflow/dropped_requests"] == 3


def test_metrics_before_prepare() -> None:
    from requestzero import RequestZeROPlugin

    with fresh(), pytest.raises(RuntimeError, match="This Accelerator has not prepared a model"):
        RequestZeROPlugin().metrics(object())  # type: ignore[arg-type]


# --- Transformers' Trainer ------------------------------------------------------------------------------------------


# Row 5 is NaN: the third of four windows of one row for each of two ranks.
ROWS = [{"batch": torch.full((WIDTH,), float("nan") if index == 5 else 1.0)} for index in range(8)]


def with_trainer(overflow: dict[str, Any], how: str, directory: str, resume: str | None) -> dict[str, Any]:
    from transformers import Trainer

    from requestzero.transformers import RequestZeROTrainingArguments

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "overflow": overflow,
    }
    with fresh():
        arguments = quiet(
            output_dir=directory,
            max_steps=4,
            per_device_train_batch_size=1,
            train_sampling_strategy="sequential",
            logging_steps=1,
            learning_rate=0.5,
            lr_scheduler_type="linear",
            save_strategy="steps",
            save_steps=3,
            remove_unused_columns=False,
        )
        if how == "line":
            args = with_documented_line({**config, "overflow": {}}, arguments, overflow=overflow)
        else:
            args = RequestZeROTrainingArguments(deepspeed=config, **arguments)
        trainer = Trainer(LossOfRowWeight(), args, train_dataset=ROWS)
        trainer.train(resume_from_checkpoint=resume)
        engine = trainer.deepspeed
        return {
            "rates": [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry],
            "counts": (engine.attempted_updates, engine.applied_updates, engine.skipped_updates),
            "weights": trainer.model.weight.detach().cpu().tolist(),
        }


def test_trainer_holds_its_schedule_and_keeps_the_counts(two_ranks: RankGroup, tmp_path: Path) -> None:
    whole = two_ranks.run(with_trainer, CHECK, "class", str(tmp_path), None)
    resumed = two_ranks.run(with_trainer, CHECK, "class", str(tmp_path), str(tmp_path / "checkpoint-3"))
    for want, got in zip(whole, resumed, strict=True):
        assert want["rates"] == [0.5, 0.375, 0.25, 0.25]
        assert want["counts"] == (4, 3, 1)
        assert got == want


def test_trainer_cannot_drop_requests(two_ranks: RankGroup) -> None:
    message = r"^ValueError: {}overflow.on_overflow='drop_request' is not possible where the losses are divided before"
    folder = tempfile.gettempdir()
    assert_fails(two_ranks, message.format(""), with_trainer, DROP, "class", folder, None)
    assert_fails(two_ranks, message.format(r".*scale_wrt_gas=False\): "), with_trainer, DROP, "line", folder, None)
