"""Each rule once with this optimizer and once with DeepSpeed's own: what goes wrong there, so that the tests can fail.

The sums of windows are compared so in ``test_cases`` and ``test_grid``, costs and host reads in ``test_costs`` and
``test_overflow``, memory in ``test_partition``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.engines import build
from support.fp16 import fp16_on_cpu
from support.models import Numbered, OneWeight, feed, full_grad
from support.overflow_configs import fp16_masters
from support.ranks import RankGroup
from support.releases import needs_deepspeed
from support.setup import Setup
from support.windows import ALL, LR, Micro, backward


def weight_change(engine: Any, before: torch.Tensor) -> float:
    """The gradient that one step has applied to the only weight; its elements are all equal."""
    change = (before - engine.module.weight.detach().float()) / LR
    assert bool((change == change[0]).all() | change.isnan().all())
    return change[0].item()


def weight(engine: Any) -> torch.Tensor:
    return engine.module.weight.detach().float().clone()


# --- zero_grad() discards the window --------------------------------------------------------------------------------


def after_zero_grad(setup: Setup, ours: bool) -> float:
    engine = build(setup, ours, model=OneWeight())
    feed(engine, 8.0, request_end=False)
    engine.zero_grad()
    before = weight(engine)
    feed(engine, 3.0)
    engine.step()
    change = weight_change(engine, before)
    engine.destroy()
    return change


@pytest.mark.parametrize("offload", [False, True])
def test_zero_grad(two_ranks: RankGroup, offload: bool) -> None:
    setup = Setup(stage=2, offload=offload)
    assert two_ranks.run(after_zero_grad, setup, True) == [3.0, 3.0]
    assert two_ranks.run(after_zero_grad, setup, False) == [11.0, 11.0]


# --- a step without a backward --------------------------------------------------------------------------------------


def lone_step(ours: bool) -> str:
    engine = build(Setup(stage=2), ours)
    engine.set_gradient_accumulation_boundary(True)
    try:
        engine.step()
    except Exception as error:
        return type(error).__name__
    finally:
        engine.destroy()
    return "applied" if engine.was_step_applied() else "nothing"


def test_a_step_without_a_backward(two_ranks: RankGroup) -> None:
    assert two_ranks.run(lone_step, True) == ["nothing"] * 2
    assert set(two_ranks.run(lone_step, False)) <= {"KeyError", "TypeError", "AttributeError", "IndexError"}


# --- checked in the host gradient's dtype ---------------------------------------------------------------------------


def beyond_fp16(ours: bool) -> tuple[bool, bool]:
    """A window whose fp32 sum is above the fp16 range, with fp16 masters: applied, and whether weights stay finite."""
    setup = Setup(stage=2, offload=True, model="fp16", accum="fp32", optimizer="cpu_adam", config=fp16_masters())
    with fp16_on_cpu():
        engine = build(setup, ours, model=OneWeight())
        feed(engine, 60000.0, request_end=False)
        feed(engine, 60000.0)
        engine.step()
        result = engine.was_step_applied(), bool(weight(engine).isfinite().all())
        engine.destroy()
    return result


def test_a_sum_beyond_the_host_dtype(two_ranks: RankGroup) -> None:
    assert two_ranks.run(beyond_fp16, True) == [(False, True)] * 2


@needs_deepspeed("an older one skips it")
def test_stock_applies_a_sum_beyond_the_host_dtype(two_ranks: RankGroup) -> None:
    assert two_ranks.run(beyond_fp16, False) == [(True, False)] * 2


# --- a gradient set while the partition is resident -----------------------------------------------------------------


def set_while_resident(ours: bool) -> float:
    from deepspeed.utils import safe_set_full_grad

    engine = build(Setup(stage=2, offload=True, model="bf16", accum="fp32", retain=True), ours, model=OneWeight())
    before = weight(engine)
    feed(engine, 1.0)
    safe_set_full_grad(engine.module.weight, torch.full((8,), 5.0, device=engine.device))
    feed(engine, 2.0)
    assert full_grad(engine).shape == (8,)
    engine.step()
    change = weight_change(engine, before)
    engine.destroy()
    return change


def test_a_gradient_set_while_the_partition_is_resident(two_ranks: RankGroup) -> None:
    assert two_ranks.run(set_while_resident, True) == [7.0, 7.0]


@needs_deepspeed("0.19.6 applies the last request alone")
def test_stock_forgets_a_gradient_that_was_set(two_ranks: RankGroup) -> None:
    assert two_ranks.run(set_while_resident, False) == [3.0, 3.0]


# --- an absent parameter without managed boundaries -----------------------------------------------------------------


def absent_from_the_second_window(ours: bool) -> str:
    """The second window's update of a layer that only the first one has used."""
    engine = build(Setup(stage=2, offload=True, managed=False), ours)
    layer, applied = engine.module.layers[1].weight, []
    for uses in (ALL, (True, False, True, True, True)):
        before = layer.detach().clone()
        for seed in (1, 2):
            backward(engine, Micro(uses, seed), mark=False)
        engine.step()
        applied.append((before - layer.detach()) / LR)
    assert applied[0].any()
    replayed = torch.equal(applied[0], applied[1])
    engine.destroy()
    return "replayed" if replayed else "something" if applied[1].any() else "nothing"


def test_an_absent_parameter_without_managed_boundaries(two_ranks: RankGroup) -> None:
    assert two_ranks.run(absent_from_the_second_window, True) == ["nothing"] * 2
    assert two_ranks.run(absent_from_the_second_window, False) == ["replayed"] * 2


# --- master weights under round robin -------------------------------------------------------------------------------


def weights_read_back(ours: bool) -> list[float]:
    from deepspeed.utils import safe_get_full_fp32_param

    engine = build(Setup(zero={"round_robin_gradients": True}), ours, model=Numbered())
    read = [safe_get_full_fp32_param(p)[0].item() for p in engine.module.parameters()]
    engine.destroy()
    return read


def test_master_weights_under_round_robin(two_ranks: RankGroup) -> None:
    assert two_ranks.run(weights_read_back, True) == [[1, 2, 3, 4]] * 2
    assert two_ranks.run(weights_read_back, False) == [[1, 3, 2, 4]] * 2


# --- the step that doubles a dynamic loss scale ---------------------------------------------------------------------


def doubling_the_loss_scale(ours: bool) -> list[float]:
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}
    applied, scales = [], []
    with fp16_on_cpu():
        engine = build(Setup(stage=2, model="fp16", accum="fp16", config={"fp16": fp16}), ours, model=OneWeight())
        for _ in range(3):
            before = weight(engine)
            feed(engine, 2.0)
            engine.step()
            applied.append(weight_change(engine, before))
            scales.append(engine.optimizer.loss_scale)
        assert max(scales) == 32.0
        engine.destroy()
    return applied


def test_the_step_that_doubles_the_loss_scale(two_ranks: RankGroup) -> None:
    assert two_ranks.run(doubling_the_loss_scale, True) == [[2.0, 2.0, 2.0]] * 2
    stock = two_ranks.run(doubling_the_loss_scale, False)[0]
    assert 1.0 in stock, stock
