"""fp16, which DeepSpeed refuses on the CPU although PyTorch computes it: allowed here for the tests."""

from __future__ import annotations

from typing import Any

import pytest

from support.fp16 import fp16_on_cpu
from support.lightning_runs import train
from support.lightning_spec import Run
from support.ranks import RankGroup


def train_in_fp16(run: Run) -> dict[str, Any]:
    with fp16_on_cpu():
        return train(run)


@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
@pytest.mark.parametrize("loss_scale", [{"loss_scale": 8.0}, {"initial_scale_power": 3, "loss_scale_window": 2}])
def test_update_is_that_of_fp32(two_ranks: RankGroup, precision: str, loss_scale: dict[str, Any]) -> None:
    """Every second update doubles the dynamic scale: the window is still divided by the one that it was made with."""
    spec: dict[str, Any] = {"schedule": False, "optimizer": "sgd"}
    want = two_ranks.run(train, Run(trainer={"accumulate": 2}, **spec))
    run = Run(options=loss_scale, trainer={"accumulate": 2, "precision": precision}, **spec)
    for expected, got in zip(want, two_ranks.run(train_in_fp16, run), strict=True):
        assert [row["norm"] for row in got["updates"]] == [row["norm"] for row in expected["updates"]]
        assert got["optimizer"]["masters"] == expected["optimizer"]["masters"]
        assert got["applied"] == 6


def test_overflow_is_skipped(two_ranks: RankGroup) -> None:
    run = Run(
        options={"overflow": {"initial_scale_power": 3, "hysteresis": 1}},
        trainer={"accumulate": 2, "precision": "16-true"},
        nan_batches=(3,),
    )
    for got in two_ranks.run(train_in_fp16, run):
        assert [row["applied"] for row in got["updates"]] == [1, 1, 2, 3, 4, 5]
        assert [row["lr"] for row in got["updates"]] == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
        assert got["skipped"] == 1
        assert got["global_step"] == 6
