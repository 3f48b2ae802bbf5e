"""ZeRO 3: windows of two weights, with this optimizer and with what DeepSpeed's own makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_partition import window_error

from support.engines import build
from support.models import OneWeight, full_grad
from support.ranks import RankGroup
from support.setup import Setup
from support.stage_3 import GATHERED, PLACES, feed_whole, setup_of
from support.two_weights import Change, TwoWeights, applied, feed

every_place = pytest.mark.parametrize("place", PLACES)


# --- weights that are absent from the last of several windows -------------------------------------------------------


def absent_from_a_plain_loop(engine: Any) -> Change:
    """One backward a step, the second without the second weight: half of 4 is left, its momentum."""
    applied(engine, lambda: feed(engine, 4.0, 4.0))
    return applied(engine, lambda: feed(engine, 1.0))


def plain_loop(setup: Setup, requestzero: bool) -> Change:
    engine = build(setup, requestzero, model=TwoWeights(), momentum=0.5)
    change = absent_from_a_plain_loop(engine)
    engine.destroy()
    return change


@every_place
def test_an_absent_weight_in_a_plain_loop(two_ranks: RankGroup, place: str) -> None:
    assert two_ranks.run(plain_loop, setup_of(place, zero=GATHERED), True) == [[3.0, 2.0]] * 2
    assert two_ranks.run(plain_loop, setup_of(place, zero=GATHERED), False) == [[3.0, 6.0]] * 2


def torch_backward(engine: Any, first: float, second: float) -> None:
    engine.set_gradient_accumulation_boundary(True)
    engine(first, second).backward()


def coalesced(engine: Any, first: float, second: float) -> None:
    with engine.coalesce_grad_reduction():
        feed(engine, first, second)


def after_an_evaluation(engine: Any, first: float, second: float) -> None:
    engine.eval()
    with torch.no_grad():
        engine(7.0, 7.0)
    engine.train()
    feed(engine, first, second)


def in_a_longer_window(setup: Setup, requestzero: bool, way: Callable[..., None]) -> list[Change]:
    """Two windows of two requests, the second of which goes another way; no second weight in the second window."""
    engine = build(setup, requestzero, model=TwoWeights())

    def window(second: float) -> None:
        feed(engine, 1.0, second)
        way(engine, 1.0, second)

    changes = [applied(engine, lambda: window(2.0)), applied(engine, lambda: window(0.0))]
    engine.destroy()
    return changes


@pytest.mark.parametrize("place", ["device", "both"])
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("way", [torch_backward, coalesced, after_an_evaluation])
def test_other_ways_to_run_a_request(
    two_ranks: RankGroup, place: str, persistent: bool, way: Callable[..., None]
) -> None:
    """DeepSpeed's own is right where all weights take part."""
    setup = setup_of(place, zero={} if persistent else GATHERED)
    assert two_ranks.run(in_a_longer_window, setup, True, way) == [[[2.0, 4.0], [2.0, 0.0]]] * 2
    assert two_ranks.run(in_a_longer_window, setup, False, way) == [[[2.0, 4.0], [2.0, 4.0]]] * 2


def finalized(engine: Any, first: float, second: float) -> None:
    """Finalize an unmanaged window, twice."""
    feed(engine, first, second)
    for _ in range(2):
        engine.optimizer.finalize_gradient_accumulation_boundary()


@every_place
def test_a_window_that_is_finalized_twice(two_ranks: RankGroup, place: str) -> None:
    setup = setup_of(place, managed=False)
    assert two_ranks.run(in_a_longer_window, setup, True, finalized) == [[[2.0, 4.0], [2.0, 0.0]]] * 2
    assert two_ranks.run(in_a_longer_window, setup, False, finalized) == [[[2.0, 4.0], [2.0, 4.0]]] * 2


def moved_sums(setup: Setup, requestzero: bool) -> Change | str:
    """Offload the gradients and bring them back, right before the step."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    engine = build(setup, requestzero, model=TwoWeights())

    def window() -> None:
        feed(engine, 1.0, 2.0)
        engine.offload_states(include=[OffloadStateTypeEnum.lp_grads], pin_memory=False)
        engine.reload_states()

    try:
        return applied(engine, window)
    except KeyError as error:
        return type(error).__name__
    finally:
        engine.destroy()


def test_sums_that_were_moved_before_the_step(two_ranks: RankGroup) -> None:
    assert two_ranks.run(moved_sums, setup_of("device"), True) == [[1.0, 2.0]] * 2
    assert two_ranks.run(moved_sums, setup_of("device"), False) == ["KeyError"] * 2


# --- dtypes ---------------------------------------------------------------------------------------------------------


def absent_with_16_bit_masters(setup: Setup, requestzero: bool) -> Change:
    """The sums of a window without the second weight, as the step would read them: their optimizer is Adam."""
    from deepspeed.utils import safe_get_full_grad

    engine = build(setup, requestzero, model=TwoWeights())
    applied(engine, lambda: feed(engine, 3.0, 3.0))
    feed(engine, 2.0)
    sums = [float(safe_get_full_grad(param)[0]) for param in engine.module.parameters()]
    engine.destroy()
    return sums


@pytest.mark.parametrize("place", ["optimizer", "both"])
@pytest.mark.parametrize("accum", ["bf16", "fp32"])
def test_an_absent_weight_with_bf16_masters(two_ranks: RankGroup, place: str, accum: str) -> None:
    config = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    setup = setup_of(place, model="bf16", accum=accum, optimizer="cpu_adam", config=config)
    assert two_ranks.run(absent_with_16_bit_masters, setup, True) == [[2.0, 0.0]] * 2
    assert two_ranks.run(absent_with_16_bit_masters, setup, False) == [[2.0, 3.0]] * 2


@pytest.mark.parametrize("place", ["device", "optimizer"])
def test_precision_of_a_long_window(two_ranks: RankGroup, place: str) -> None:
    """Of 16 micro-batches, on each of which all ranks have the same gradient: that of DeepSpeed's own."""
    for accum in ("fp32", "bf16"):
        setup = setup_of(place, model="bf16", accum=accum)
        ours, stock = (two_ranks.run(window_error, setup, whose)[0] for whose in (True, False))
        assert ours == stock
        assert ours == 0.0 if accum == "fp32" else ours > 1e-3


def reduced_in_fp32(setup: Setup, requestzero: bool) -> float:
    """The mean over ranks of 1.0 and 1.0078125."""
    import deepspeed.comm as dist

    engine = build(setup, requestzero, model=OneWeight())
    feed_whole(engine, (1.0, 1.0078125)[dist.get_rank()])
    read = full_grad(engine).flatten()[0].item()
    engine.destroy()
    return read


@pytest.mark.parametrize("place", ["device", "optimizer"])
@pytest.mark.parametrize("requestzero", [True, False])
def test_sums_and_reduction_in_fp32(two_ranks: RankGroup, place: str, requestzero: bool) -> None:
    """As DeepSpeed's own: its sum is rounded only where the reduction is in the model's dtype."""
    for communication, expected in (({"communication_data_type": "fp32"}, 1.00390625), ({}, 1.0)):
        setup = setup_of(place, model="bf16", config=communication | {"bf16": {"enabled": True}})
        assert two_ranks.run(reduced_in_fp32, setup, requestzero) == [expected] * 2
