"""Windows that are no multiple of batches: short ones, marked ones, left ones; and manual optimization."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from support.failures import assert_fails
from support.lightning_data import MARKED, batch_value
from support.lightning_reference import weights_after
from support.lightning_runs import train
from support.lightning_spec import Run
from support.ranks import RankGroup
from support.setup import AT_REQUEST_ENDS, KEEP_OPTIMIZER


def reference(windows: list[list[int]], divide: bool = True) -> list[list[float]]:
    """The weights after each update with the mean over two ranks of the batches of each window, or their sum."""

    def gradient(window: list[int]) -> list[float]:
        totals = [sum(float(batch_value(index, rank)[i]) for index in window for rank in (0, 1)) / 2 for i in range(8)]
        return [total / len(window) if divide else total for total in totals]

    return weights_after([gradient(window) for window in windows])


def check(results: list[dict[str, Any]], windows: list[list[int]], epoch_length: int, **options: Any) -> None:
    for got in results:
        assert [row["step"] for row in got["updates"]] == list(range(1, len(windows) + 1))
        assert [row["batch"] for row in got["updates"]] == [window[-1] % epoch_length for window in windows]
        for row, want in zip(got["updates"], reference(windows, **options), strict=True):
            assert row["weights"] == pytest.approx(want, rel=1e-6, abs=1e-6)
        assert got["global_step"] == got["applied"] == len(windows)
        assert got["open"] is False


def discards(result: dict[str, Any]) -> list[str]:
    return [text for text in result["warnings"] if "discards an open update window" in text]


def test_short_last_window_is_stepped(two_ranks: RankGroup) -> None:
    """5 batches an epoch, 2 requests per update, 3 epochs: 9 updates (stock DeepSpeed makes 7 and reports 6)."""
    results = two_ranks.run(train, Run(batches=5, trainer={"accumulate": 2, "max_epochs": 3}, schedule=False))
    windows = [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9], [10, 11], [12, 13], [14]]
    check(results, windows, 5)
    # Only at a window's start, whatever batch_idx says.
    assert results[0]["calls"].count("on_before_zero_grad") == 9
    assert results[0]["calls"].count("on_before_optimizer_step") == 9


def test_short_last_window_is_dropped(two_ranks: RankGroup) -> None:
    spec = Run(
        batches=5,
        trainer={"accumulate": 2, "max_epochs": 3},
        options={"incomplete_window": "drop"},
        schedule=False,
        validate=True,
    )
    results = two_ranks.run(train, spec)
    check(results, [[0, 1], [2, 3], [5, 6], [7, 8], [10, 11], [12, 13]], 5)
    assert discards(results[0]) == []
    assert [name for name, _ in results[0]["seen"]].count("validate") == 6


@pytest.mark.parametrize("limit", [5, 0.5])
def test_limit_train_batches_ends_the_epoch(two_ranks: RankGroup, limit: float) -> None:
    results = two_ranks.run(
        train, Run(batches=10, trainer={"accumulate": 2, "limit_train_batches": limit}, schedule=False)
    )
    check(results, [[0, 1], [2, 3], [4]], 10)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_released_partition_comes_back_with_the_forward(two_ranks: RankGroup, stage: int) -> None:
    """Lightning, too, calls the engine's forward; the counts outlive the engine."""
    spec = Run(
        batches=6,
        trainer={"accumulate": 3, "precision": "bf16-true"},
        options={
            "stage": stage,
            "offload_optimizer": True,
            "grad_accum_dtype": "fp32",
            "reduce_gradients_at": AT_REQUEST_ENDS[stage],
            "config": KEEP_OPTIMIZER,
        },
        schedule=False,
    )
    for got in two_ranks.run(train, spec):
        traffic = got["traffic"]
        windows = got["global_step"]
        assert traffic.publications == traffic.released == 3 * windows > 0
        assert traffic.restores == traffic.early_restores == 2 * windows


REQUESTS: list[tuple[bool, bool | None]] = [
    (False, None),
    (True, None),
    (True, None),
    (False, None),
    (False, None),
    (True, None),
    (True, None),
]


@pytest.mark.parametrize("stage", [1, 2])
def test_requests_of_several_micro_batches(two_ranks: RankGroup, stage: int) -> None:
    """``accumulate_grad_batches`` counts requests: micro-batches 0-2 and 3-6 make a window of two requests each."""
    spec = Run(
        batches=7,
        marks=REQUESTS,
        trainer={"accumulate": 2, "max_epochs": 2, "log_every_n_steps": 2},
        options={"stage": stage},
        schedule=False,
    )
    results = two_ranks.run(train, spec)
    check(results, [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13]], 7)
    assert [step for step, _ in results[0]["logged"]] == [1, 3]


@pytest.mark.parametrize("normalization", ["mean", "sum"])
def test_windows_marked_by_the_loader(two_ranks: RankGroup, normalization: str) -> None:
    spec = Run(
        batches=7,
        marks=MARKED,
        trainer={"max_epochs": 2},
        options={"normalization": normalization},
        schedule=False,
    )
    results = two_ranks.run(train, spec)
    windows = [[0, 1, 2], [3, 4, 5], [6], [7, 8, 9], [10, 11, 12], [13]]
    check(results, windows, 7, divide=normalization == "mean")


PER_UPDATE = (
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "lr_scheduler_step",
)


@pytest.mark.parametrize(
    ("marks", "accumulate", "updates"),
    [(REQUESTS, 2, ["TTT", "TTTT"]), (MARKED, 1, ["TTT", "TTT", "T"])],
    ids=["requests of several micro-batches", "windows marked by the loader"],
)
def test_hooks_and_schedule_go_by_windows(
    two_ranks: RankGroup, marks: list[tuple[bool, bool | None]], accumulate: int, updates: list[str]
) -> None:
    spec = Run(batches=7, marks=marks, trainer={"accumulate": accumulate, "max_epochs": 2})
    for got in two_ranks.run(train, spec):
        calls = [name for name in got["calls"] if name in PER_UPDATE or name == "on_before_backward"]
        want: list[str] = []
        for window in updates * 2:
            # Lightning runs the last micro-batch's closure within optimizer_step.
            first, last = len(window) == 1, len(window) - 1
            opening = ["on_before_zero_grad", "optimizer_zero_grad", "on_before_backward"]
            want += [] if first else [*opening, *["on_before_backward"] * (last - 1)]
            want += ["optimizer_step", *(opening if first else ["on_before_backward"])]
            want += ["on_before_optimizer_step", "configure_gradient_clipping", "lr_scheduler_step"]
        assert calls == want
        # The schedule halves the learning rate after every second update.
        count = 2 * len(updates)
        assert [row["lr"] for row in got["updates"]] == [0.5 * 0.5 ** (update // 2) for update in range(1, count + 1)]


def test_epoch_that_ends_inside_a_request_warns(two_ranks: RankGroup) -> None:
    spec = Run(
        batches=4, marks=[(True, None), (True, None), (False, None), (False, None)],
        trainer={"accumulate": 2}, schedule=False,
    )  # fmt: skip
    results = two_ranks.run(train, spec)
    check(results, [[0, 1], [2, 3]], 4)
    assert any("ended inside request 'r3'" in text for text in results[0]["warnings"])


def test_validation_waits_for_the_window(two_ranks: RankGroup) -> None:
    """Due after batches 3, 6, 9 and 12, with windows of 4: after batches 4, 8 and 12, and the updates are unchanged."""
    plain = Run(trainer={"accumulate": 4}, schedule=False)
    checked = Run(
        trainer={"accumulate": 4, "val_check_interval": 3, "num_sanity_val_steps": 2},
        schedule=False,
        validate=True,
    )
    results = two_ranks.run(train, checked)
    check(results, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], 12)
    order = [name for name, _ in results[0]["seen"]]
    assert order == ["validate"] * 2 + (["train"] * 4 + ["validate"] * 2) * 3
    assert results[0]["weights"] == two_ranks.run(train, plain)[0]["weights"]


class StopInWindow(Callback):
    """Stops after the sixth batch, in the middle of the second window of four."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if args[2] == 5:
            trainer.should_stop = True


class SkipRestOfEpoch(Callback):
    """Lets the model end every epoch at its sixth batch."""

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        object.__setattr__(module, "on_train_batch_start", lambda batch, index: -1 if index == 5 else None)


def test_stopping_early_discards_the_window(two_ranks: RankGroup) -> None:
    results = two_ranks.run(
        train, Run(trainer={"accumulate": 4}, callbacks=[StopInWindow], schedule=False, validate=True)
    )
    check(results, [[0, 1, 2, 3]], 12)
    assert len(discards(results[0])) == 1
    assert "2 micro-batches, 2 ended requests (epoch 0, after update 1): training stops" in discards(results[0])[0]
    assert [name for name, _ in results[0]["seen"]].count("validate") == 2


def test_leaving_an_epoch_early_discards_the_window(two_ranks: RankGroup) -> None:
    """Nothing leaks: the next epoch's windows are exact. Neither does the schedule move."""
    results = two_ranks.run(
        train, Run(batches=8, trainer={"accumulate": 4, "max_epochs": 2}, callbacks=[SkipRestOfEpoch])
    )
    for got in results:
        # Batches 0-4 and the one that was turned down (5), then 6-10.
        assert [row["lr"] for row in got["updates"]] == [0.5, 0.25]
        assert got["global_step"] == 2
    text = "1 micro-batches, 1 ended requests (epoch {0}, after update {1}): the epoch was left inside it"
    assert [text.format(0, 1) in discards(results[0])[0], text.format(1, 2) in discards(results[0])[1]] == [True] * 2


def test_max_steps_counts_updates(two_ranks: RankGroup) -> None:
    results = two_ranks.run(
        train, Run(batches=7, marks=MARKED, trainer={"max_steps": 4, "max_epochs": -1}, schedule=False)
    )
    check(results, [[0, 1, 2], [3, 4, 5], [6], [7, 8, 9]], 7)


@pytest.mark.parametrize("stage", [1, 2])
def test_manual_optimization(two_ranks: RankGroup, stage: int) -> None:
    """Each batch is a request, ``opt.step()`` applies the window, ``zero_grad()`` after it changes nothing."""
    options = {"stage": stage}
    results = two_ranks.run(train, Run(manual="every_third", options=options, schedule=False))
    check(results, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], 12)
    # One entry per update, not per batch.
    assert [step for step, _ in results[0]["logged"]] == [0, 1, 2, 3]

    results = two_ranks.run(train, Run(manual="twice_each", options=options, schedule=False))
    check(results, [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5], [6, 6, 7, 7], [8, 8, 9, 9], [10, 10, 11, 11]], 12)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1},
        {"stage": 1, "grad_accum_dtype": "fp32"},
        {"stage": 2},
        {"stage": 1, "offload_optimizer": True, "config": KEEP_OPTIMIZER},
        {"stage": 2, "offload_optimizer": True, "config": KEEP_OPTIMIZER},
    ],
)
def test_manual_zero_grad_discards_the_open_window(two_ranks: RankGroup, options: dict[str, Any]) -> None:
    results = two_ranks.run(train, Run(manual="discard", options=options, schedule=False))
    check(results, [[1, 2], [4, 5], [7, 8], [10, 11]], 12)


def test_manual_windows_and_requests(two_ranks: RankGroup) -> None:
    """``strategy.window_end`` tells what the loader marked, ``strategy.end_request()`` ends a request within
    a batch."""
    results = two_ranks.run(train, Run(manual="marked", marks=MARKED, batches=7, schedule=False))
    check(results, [[0, 1, 2], [3, 4, 5]], 7)
    assert "1 micro-batches, 1 ended requests" in discards(results[0])[0]
    results = two_ranks.run(train, Run(manual="two_requests", schedule=False))
    # Three have ended when the step comes; the fourth ends with it.
    assert results[0]["requests"] == [3] * 6


def order(result: dict[str, Any]) -> str:
    return "".join({"train": "T", "validate": "V"}[name] for name, _ in result["seen"])


def test_epoch_that_ends_inside_a_manual_window_is_validated(two_ranks: RankGroup) -> None:
    """The open window is discarded before the validation at the epoch's end, which does not move to the next epoch."""
    spec = Run(manual="marked", marks=MARKED, batches=7, schedule=False, validate=True, trainer={"max_epochs": 2})
    results = two_ranks.run(train, spec)
    assert [order(got) for got in results] == ["TTTTTTTVV" * 2] * 2
    first, second = discards(results[0])
    assert "1 micro-batches, 1 ended requests (epoch 0, after update 2): the epoch ends inside it" in first
    assert "(epoch 1, after update 4): the epoch ends inside it" in second
    check(results, [[0, 1, 2], [3, 4, 5], [7, 8, 9], [10, 11, 12]], 7)
    # The discarded windows are no updates in the log either.
    assert [step for step, values in results[0]["logged"] if "loss" in values] == [0, 1, 2, 3]


def test_validation_due_in_a_window_that_the_epoch_leaves(two_ranks: RankGroup) -> None:
    """It is not made up for in the next epoch, whose first window ends before a validation is due."""
    spec = Run(
        batches=8,
        trainer={"accumulate": 4, "max_epochs": 2, "val_check_interval": 5},
        callbacks=[SkipRestOfEpoch],
        schedule=False,
        validate=True,
    )
    assert order(two_ranks.run(train, spec)[0]) == "TTTTT" * 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            Run(batches=7, marks=MARKED, trainer={"accumulate": 2}),
            r"marks the ends of update windows itself .*accumulate_grad_batches=2.*leave accumulate",
        ),
        (
            Run(batches=2, marks=[(True, None), (True, True)]),
            r"request 'r1' has window_end=True, unlike the ones before it",
        ),
    ],
)
def test_contradictory_marks(two_ranks: RankGroup, spec: Run, message: str) -> None:
    assert_fails(two_ranks, message, train, spec)
