"""Plain batches: every update, hook, log entry and counter is what ``strategy="ddp"`` gives."""

from __future__ import annotations

from typing import Any

import pytest

from support.lightning_model import START
from support.lightning_runs import train
from support.lightning_spec import Run
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER

# 3 epochs of 12 batches: full windows for 1, 3 and 4.
EPOCHS = 3


def ddp(two_ranks: RankGroup, **spec: Any) -> list[dict[str, Any]]:
    return two_ranks.run(train, Run(strategy="ddp", **spec))


def series(result: dict[str, Any], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in result["updates"]]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1},
        {"stage": 2},
        {"stage": 1, "offload_optimizer": True, "config": KEEP_OPTIMIZER},
        {"stage": 2, "offload_optimizer": True, "config": KEEP_OPTIMIZER},
    ],
    ids=["stage1", "stage2", "stage1_offload", "stage2_offload"],
)
def test_bit_for_bit(two_ranks: RankGroup, options: dict[str, Any], accumulate: int) -> None:
    trainer = {"accumulate": accumulate, "max_epochs": EPOCHS}
    reference = ddp(two_ranks, trainer=trainer)
    ours = two_ranks.run(train, Run(options={**options, "log_metrics": False}, trainer=trainer))
    for want, got in zip(reference, ours, strict=True):
        assert len(got["updates"]) == EPOCHS * 12 // accumulate
        assert series(got, "step", "batch", "weights", "lr", "norm") == series(
            want, "step", "batch", "weights", "lr", "norm"
        )
        assert got["weights"] == want["weights"]
        assert got["logged"] == want["logged"]
        assert got["calls"] == want["calls"]
        assert got["seen"] == want["seen"]
        assert got["global_step"] == got["applied"] == want["global_step"]
        assert got["skipped"] == 0
    assert ours[0]["seen"] == ours[1]["seen"]
    assert ours[0]["weights"] == ours[1]["weights"]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_three_requests_within_rounding(two_ranks: RankGroup, optimizer: str) -> None:
    """DDP divides every loss by 3, here the sum is divided once: equal to a few units in the last place of fp32."""
    spec = {"trainer": {"accumulate": 3, "max_epochs": EPOCHS}, "model": "curved", "optimizer": optimizer}
    reference, ours = ddp(two_ranks, **spec), two_ranks.run(train, Run(**spec))
    for want, got in zip(reference, ours, strict=True):
        assert len(got["updates"]) == 12
        for expected, row in zip(want["updates"], got["updates"], strict=True):
            assert row["weights"] == pytest.approx(expected["weights"], rel=2e-5, abs=2e-5)
            assert row["norm"] == pytest.approx(expected["norm"], rel=2e-5)
            assert row["lr"] == expected["lr"]
        assert got["calls"] == want["calls"]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_clipping_acts_on_the_mean(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    spec = {"trainer": {"accumulate": 4, "max_epochs": EPOCHS, "gradient_clip_val": 0.5}}
    options = {
        "stage": stage,
        "offload_optimizer": offload,
        "config": KEEP_OPTIMIZER,
    }
    reference, ours = ddp(two_ranks, **spec)[0], two_ranks.run(train, Run(options=options, **spec))[0]
    assert all(row["norm"] > 0.5 for row in ours["updates"])
    for expected, row in zip(reference["updates"], ours["updates"], strict=True):
        # clip_grad_norm_ adds 1e-6 to the norm that it divides by.
        assert row["weights"] == pytest.approx(expected["weights"], rel=1e-5, abs=1e-5)
        assert row["norm"] == expected["norm"]


def test_stock_strategy_makes_smaller_updates(two_ranks: RankGroup) -> None:
    """The reason for all of the above: Lightning's own strategy divides by ``accumulate_grad_batches`` twice."""
    spec = {"trainer": {"accumulate": 4}, "schedule": False}
    want = ddp(two_ranks, **spec)[0]["updates"][0]["weights"]
    stock = two_ranks.run(train, Run(strategy="stock", **spec))[0]["updates"][0]["weights"]
    ours = two_ranks.run(train, Run(**spec))[0]["updates"][0]["weights"]
    assert ours == want
    assert want != START
    assert [4 * (b - a) for a, b in zip(START, stock, strict=True)] == [b - a for a, b in zip(START, want, strict=True)]


def test_sum_is_not_divided(two_ranks: RankGroup) -> None:
    spec = {"trainer": {"accumulate": 4}, "schedule": False}
    mean = two_ranks.run(train, Run(**spec))[0]["updates"][0]
    total = two_ranks.run(train, Run(options={"normalization": "sum"}, **spec))[0]["updates"][0]
    assert total["norm"] == 4 * mean["norm"]
    assert [b - a for a, b in zip(START, total["weights"], strict=True)] == [
        4 * (b - a) for a, b in zip(START, mean["weights"], strict=True)
    ]


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bf16(two_ranks: RankGroup, precision: str) -> None:
    """The masters are fp32, so that with data that bf16 holds the updates are those of fp32, rounded when read."""
    options = {"grad_accum_dtype": "fp32", "stage": 1}
    spec: dict[str, Any] = {"trainer": {"accumulate": 4, "precision": precision}, "schedule": False}
    want = two_ranks.run(train, Run(trainer={"accumulate": 4}, schedule=False))
    got = two_ranks.run(train, Run(options=options, **spec))
    for a, b in zip(want, got, strict=True):
        assert [row["norm"] for row in a["updates"]] == [row["norm"] for row in b["updates"]]
        assert a["optimizer"]["masters"] == b["optimizer"]["masters"]


def test_nan_window_is_skipped_and_counted(two_ranks: RankGroup) -> None:
    """A skipped update counts as attempted; neither weights, nor the schedule, nor the applied counter move."""
    clean = two_ranks.run(train, Run(trainer={"accumulate": 2, "max_epochs": 1}))
    checked = {"overflow": {"check_grad_overflow": True}}  # off by default in fp32
    ours = two_ranks.run(train, Run(options=checked, trainer={"accumulate": 2, "max_epochs": 1}, nan_batches=(2,)))
    for want, got in zip(clean, ours, strict=True):
        rows = got["updates"]
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert [row["applied"] for row in rows] == [1, 1, 2, 3, 4, 5]
        assert [row["skipped"] for row in rows] == [0, 1, 1, 1, 1, 1]
        assert rows[0]["weights"] == want["updates"][0]["weights"] == rows[1]["weights"]
        # The schedule halves after every second applied update.
        assert [row["lr"] for row in rows] == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
        assert got["global_step"] == 6


def test_stock_strategy_moves_the_schedule_on_a_skipped_step(two_ranks: RankGroup) -> None:
    stock = two_ranks.run(train, Run(strategy="stock", trainer={"accumulate": 2}, nan_batches=(2,)))[0]
    assert [row["lr"] for row in stock["updates"]] == [0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]
