"""Gradients that are not finite: the window is skipped as a whole, nothing of it survives, and nobody waits for it."""

from __future__ import annotations

import pytest
import torch

from requestzero.probe.counters import Operators
from support.engines import build, masters, masters_and_state
from support.fp16 import fp16_on_cpu
from support.grid import every_place
from support.models import OneWeight, feed
from support.overflow_configs import UNCHECKED_BF16, fp16_masters
from support.poison import poisoned_backward
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import assert_exact_window
from support.windows import ALL, LR, Micro, backward


def skipped(setup: Setup, position: int, poison: float, rank: int) -> None:
    engine = build(setup)
    for micro in (Micro(ALL, 1), Micro(ALL, 2)):
        backward(engine, micro)
    engine.step()
    before = masters_and_state(engine)
    for i in range(3):
        # The poisoned layer is absent from the requests after.
        if i == position:
            poisoned_backward(engine, Micro(ALL, i), poison, rank)
        else:
            backward(engine, Micro((*ALL[:4], i < position), i))
    engine.step()
    assert not engine.was_step_applied()
    assert (engine.skipped_steps, engine.applied_updates) == (1, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, masters_and_state(engine), strict=True))
    assert not engine.update_window.is_open
    assert engine.grad_partition_bytes == 0
    if setup.optimizer == "sgd":
        for micros in ([Micro((True, True, False, True, True), 5)], [Micro(ALL, 6), Micro(ALL, 7)]):
            assert_exact_window(engine, micros)
    engine.destroy()


@every_place
@pytest.mark.parametrize("accum", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("position", "poison", "rank", "optimizer"),
    [
        (0, float("nan"), 0, "sgd"),
        (1, float("inf"), 1, "adamw"),
        (2, float("-inf"), 1, "sgd"),
        (0, float("inf"), 1, "adamw"),
    ],
)
def test_the_window_is_skipped_on_all_ranks(
    two_ranks: RankGroup, stage: int, offload: bool, accum: str, position: int, poison: float, rank: int, optimizer: str
) -> None:
    setup = Setup(stage=stage, offload=offload, model="bf16", accum=accum, optimizer=optimizer, retain=position == 1)
    two_ranks.run(skipped, setup, position, poison, rank)


def applied_without_check(setup: Setup) -> tuple[bool, bool, int]:
    engine = build(setup)
    poisoned_backward(engine, Micro(ALL, 1), float("nan"), 0)
    engine.step()
    result = engine.was_step_applied(), bool(masters(engine)[-1].isnan().any()), engine.skipped_steps
    engine.destroy()
    return result


@every_place
def test_the_check_can_be_off_in_bf16(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    setup = Setup(stage=stage, offload=offload, model="bf16", accum="fp32", config=UNCHECKED_BF16)
    assert two_ranks.run(applied_without_check, setup) == [(True, True, 0)] * 2


# --- host reads -----------------------------------------------------------------------------------------------------


def host_reads(setup: Setup, requestzero: bool) -> tuple[list[int], int]:
    engine = build(setup, requestzero)
    backwards = []
    for seed, end in enumerate((False, True, True)):
        engine.set_gradient_accumulation_boundary(end)
        with Operators() as operators:
            backward(engine, Micro(ALL, seed, end))
        backwards.append(operators.host_reads)
    with Operators() as operators:
        engine.step()
    engine.destroy()
    return backwards, operators.host_reads


@every_place
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("accum", ["bf16", "fp32"])
def test_no_host_read_in_backward_and_at_most_one_in_step(
    two_ranks: RankGroup, stage: int, offload: bool, check: bool, accum: str, clip: float
) -> None:
    config = {"bf16": {"enabled": True, "check_grad_overflow": check}, "gradient_clipping": clip}
    setup = Setup(stage=stage, offload=offload, model="bf16", accum=accum, config=config)
    reads = 1 if check or clip else 0  # nothing looks at the gradient where the check is off
    assert two_ranks.run(host_reads, setup, True) == [([0, 0, 0], reads)] * 2


def test_stock_reads_the_host_per_parameter(two_ranks: RankGroup) -> None:
    """The count can fail: DeepSpeed's own optimizer reads once per owned parameter and boundary."""
    backwards, step = two_ranks.run(host_reads, Setup(offload=True, model="bf16", accum="fp32"), False)[0]
    assert backwards[0] == 0
    assert min(backwards[1:]) >= 2
    assert step > 3


# --- fp16 -----------------------------------------------------------------------------------------------------------


def fp16_dynamic_scale(stage: int, offload: bool, accum: str) -> None:
    """The step that doubles the scale still divides by the scale of its own backwards."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}
    setup = Setup(stage=stage, offload=offload, model="fp16", accum=accum, config={"fp16": fp16})
    with fp16_on_cpu():
        engine = build(setup, model=OneWeight())
        scales = []
        for value in (1.0, 2.0, 3.0, float("inf"), 4.0):
            before = masters(engine)[0]
            for _ in range(2):
                feed(engine, value)
            engine.step(divisor=2.0)
            scales.append(engine.optimizer.loss_scale)
            applied = (before - masters(engine)[0]) / LR
            assert torch.equal(applied, torch.full((8,), value if value < 5 else 0.0)), (value, applied)
            if value < 5:
                assert float(engine.get_global_grad_norm()) == pytest.approx(value * 8**0.5, rel=1e-6)
        assert max(scales) > scales[0]
        assert scales[3] == scales[2] / 2
        assert engine.skipped_steps == 1
        engine.destroy()


@every_place
@pytest.mark.parametrize("accum", ["fp16", "fp32"])
def test_dynamic_loss_scale_and_divisor_together(two_ranks: RankGroup, stage: int, offload: bool, accum: str) -> None:
    two_ranks.run(fp16_dynamic_scale, stage, offload, accum)


def beyond_fp16(stage: int, contributions: list[float]) -> tuple[bool, float]:
    """fp32 accumulation with fp16 masters, one value per request: whether the step was applied, and the norm."""
    setup = Setup(stage=stage, offload=True, model="fp16", accum="fp32", optimizer="cpu_adam", config=fp16_masters())
    with fp16_on_cpu():
        engine = build(setup, model=OneWeight())
        for value in contributions:
            feed(engine, value)
        engine.step()
        applied = engine.was_step_applied()
        finite = all(bool(m.isfinite().all()) for m in masters(engine))
        norm = float(engine.get_global_grad_norm())
        engine.destroy()
    assert finite
    return applied, norm


@pytest.mark.parametrize("stage", [1, 2])
def test_a_sum_beyond_the_host_dtype_skips_the_step(two_ranks: RankGroup, stage: int) -> None:
    assert [applied for applied, _ in two_ranks.run(beyond_fp16, stage, [60000.0, 60000.0])] == [False, False]


@pytest.mark.parametrize("stage", [1, 2])
def test_an_overflow_that_later_requests_cancel_is_none(two_ranks: RankGroup, stage: int) -> None:
    for applied, norm in two_ranks.run(beyond_fp16, stage, [60000.0, 60000.0, -60000.0]):
        assert applied
        assert norm == pytest.approx(60000 * 8**0.5, rel=1e-3)  # 60000 itself is rounded in fp16
