"""What the doctor says of configs of stage 3 beyond plain windows, and of loss scales, is what DeepSpeed does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from requestzero.doctor.stock_losses import Loss, stock_run
from support.engines import build
from support.fp16 import fp16_where_needed
from support.models import WIDTH
from support.overflow_configs import overflow_config
from support.ranks import RankGroup
from support.setup import Setup
from support.stage_3 import PARAMS
from support.two_weights import Change, TwoWeights, applied, feed


def two_forwards_first(engine: Any) -> Change:
    def run() -> None:
        if engine._config.managed_gradient_accumulation:
            engine.set_gradient_accumulation_boundary(True)
        for loss in [engine(value, value) for value in (1.0, 2.0)]:
            engine.backward(loss)

    return applied(engine, run)


def set_between(engine: Any) -> Change:
    from deepspeed.utils import safe_set_full_grad

    def run() -> None:
        feed(engine, 1.0, 1.0)
        safe_set_full_grad(engine.module.first, torch.full((WIDTH,), 5.0))
        feed(engine, 2.0, 2.0)

    return applied(engine, run)


def used_twice(engine: Any) -> Change:
    return applied(engine, lambda: feed(engine, 4.0, 2.0, segments=True))


def discarded(engine: Any) -> Change:
    def run() -> None:
        feed(engine, 8.0, 8.0)
        engine.optimizer.zero_grad()
        feed(engine, 3.0)

    return applied(engine, run)


def after_an_overflow(engine: Any) -> Change:
    applied(engine, lambda: feed(engine, 1.0, float("inf")))
    return applied(engine, lambda: feed(engine, 1.0))


# What is right, and what each loss makes of it. The last one spoils the weights.
SCENARIOS: list[tuple[Callable[[Any], Change], Change, dict[Loss, Change]]] = [
    (two_forwards_first, [3.0, 3.0], {Loss.FIRST_OF_TWO_FORWARDS: [2.0, 2.0]}),
    (set_between, [7.0, 3.0], {Loss.EDITED_SUM: [3.0, 3.0]}),
    (used_twice, [4.0, 2.0], {Loss.USED_TWICE: [1.0, 2.0]}),
    (discarded, [3.0, 0.0], {Loss.DISCARDED_SUM: [3.0, 8.0]}),
    (after_an_overflow, [1.0, 0.0], {Loss.SKIPPED_AGAIN: [0.0, 0.0], Loss.INF_APPLIED: [1.0, float("inf")]}),
]


def static_scale() -> dict[str, Any]:
    return {"fp16": {"enabled": True, "loss_scale": 1.0}}


ZERO = {"reduce_bucket_size": WIDTH}  # a bucket for each weight
SETUPS = [
    Setup(stage=3, zero=ZERO),
    Setup(stage=3, zero=ZERO, managed=False),
    Setup(stage=3, zero={**ZERO, **PARAMS}, model="bf16", accum="fp32"),
    Setup(stage=3, zero=ZERO, model="fp16", accum="fp16", config=static_scale()),
    Setup(stage=3, offload=True, zero={**ZERO, "overlap_comm": False}),
    Setup(stage=3, offload=True, zero=ZERO, model="bf16", accum="bf16"),
    Setup(stage=3, offload=True, zero={**ZERO, **PARAMS}, model="bf16", accum="fp32", managed=False),
    Setup(stage=3, offload=True, zero=ZERO, model="fp16", accum="fp32", config=static_scale()),
]


def played(setup: Setup, requestzero: bool) -> list[Change]:
    """The change that an engine makes in each scenario."""
    with fp16_where_needed(setup.model):
        engine = build(setup, requestzero, model=TwoWeights())
        changes = [scenario(engine) for scenario, _, _ in SCENARIOS]
        engine.destroy()
    return changes


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_the_result_is_what_stage_3_does(two_ranks: RankGroup, setup: Setup) -> None:
    losses = set(stock_run(setup.deepspeed_config(requestzero=False)).losses)
    for changes in two_ranks.run(played, setup, False):
        for change, (scenario, right, wrong) in zip(changes, SCENARIOS, strict=True):
            expected = [value for loss, value in wrong.items() if loss in losses] or [right]
            assert [change] == expected, scenario.__name__
    # DeepSpeed's stage 3 always checks for inf, this package in fp32 only if asked.
    checked = replace(setup, config=overflow_config("fp32")) if setup.model == "fp32" else setup
    assert two_ranks.run(played, checked, True) == [[right for _, right, _ in SCENARIOS]] * 2


def test_every_loss_of_the_scenarios_occurs() -> None:
    found = {loss for setup in SETUPS for loss in stock_run(setup.deepspeed_config(requestzero=False)).losses}
    assert found >= {loss for _, _, wrong in SCENARIOS for loss in wrong}


# --- loss scales, at every stage ------------------------------------------------------------------------------------


def steps_of_one(setup: Setup, requestzero: bool) -> list[Change]:
    with fp16_where_needed("fp16"):
        engine = build(setup, requestzero, model=TwoWeights())
        changes = [applied(engine, lambda: feed(engine, 1.0, 1.0)) for _ in range(4)]
        engine.destroy()
    return changes


@pytest.mark.parametrize(("stage", "offload"), [(1, True), (2, False), (3, False), (3, True)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_loss_scales(two_ranks: RankGroup, stage: int, offload: bool, dynamic: bool) -> None:
    scale = {"initial_scale_power": 4, "loss_scale_window": 2} if dynamic else {"loss_scale": 16.0}
    setup = Setup(stage=stage, offload=offload, model="fp16", accum="fp32", config={"fp16": {"enabled": True, **scale}})
    losses = stock_run(setup.deepspeed_config(requestzero=False)).losses
    assert (Loss.RAISED_SCALE in losses) is dynamic
    stock = two_ranks.run(steps_of_one, setup, False)[0]
    assert {tuple(change) for change in stock} == ({(1.0, 1.0), (0.5, 0.5)} if dynamic else {(1.0, 1.0)})
    assert two_ranks.run(steps_of_one, setup, True) == [[[1.0, 1.0]] * 4] * 2
