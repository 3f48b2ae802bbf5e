"""Ranks that own nothing of a group but padding take part in every collective of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.engines import build, masters, module_weights
from support.grid import every_place, every_sum
from support.models import Few
from support.overflow_configs import UNCHECKED_BF16
from support.ranks import RankGroup
from support.releases import is_deepspeed_since
from support.setup import Setup
from support.windows import LR


def few_elements(setup: Setup, sizes: list[int], poison: bool) -> None:
    engine = build(setup, model=Few(sizes))
    for values in ([1.0, 2.0, 3.0], [5.0]):
        before = masters(engine)
        for value in values:
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(value))
        engine.step(divisor=2.0)
        for b, a in zip(before, masters(engine), strict=True):
            assert torch.equal((b - a) / LR, torch.full_like(a, sum(values) / 2))
    if poison:
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(float("nan")))
        engine.step()
        assert not engine.was_step_applied()
    engine.destroy()


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("offload", [False, True])
@every_sum
def test_fewer_elements_than_ranks(request: Any, ranks: str, stage: int, offload: bool, model: str, accum: str) -> None:
    group: RankGroup = request.getfixturevalue(ranks)
    setup = Setup(stage=stage, offload=offload, model=model, accum=accum, groups=2)
    group.run(few_elements, setup, [2, 3], model == "bf16", timeout=60)


def different_divisors(setup: Setup) -> str:
    import deepspeed.comm as dist

    engine = build(setup, model=Few([4, 4]))
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(1.0))
    with pytest.raises(RuntimeError, match="The ranks divide the update window by different numbers") as error:
        engine.step(divisor=100000 + dist.get_rank())
    engine.destroy()
    return str(error.value)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("offload", [False, True])
def test_different_divisors_are_an_error_on_all_ranks(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    messages = two_ranks.run(different_divisors, Setup(stage=stage, offload=offload, model="bf16"), timeout=60)
    assert ["this rank by 100000," in messages[0], "this rank by 100001," in messages[1]] == [True, True]


def read_and_set_early(setup: Setup) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a gradient as zero, then set it, where a rank or a group has had none in the window yet.

    At stage 2 inside an open request, at stage 1 after its end, before which nothing is reduced.
    """
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    class Optional(Few):
        def forward(self, x: float, last: bool) -> torch.Tensor:
            return super().forward(x) if last else self.weights[0].sum() * x

    engine = build(setup, model=Optional([6, 6]))
    weight = engine.module.weights[1]
    for window in range(2):
        before = masters(engine)[1]
        engine.set_gradient_accumulation_boundary(setup.stage == 1)
        engine.backward(engine(2.0, window == 0))
        if window:
            read = safe_get_full_grad(weight).float().cpu().clone()
            safe_set_full_grad(weight, torch.full((6,), 3.0))
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(4.0, True))
        engine.step()
    applied = (before - masters(engine)[1]) / LR
    engine.destroy()
    return read, applied


@every_place
@every_sum
@pytest.mark.parametrize("groups", [1, 2])
def test_an_absent_parameter_before_its_owner_has_a_sum(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str, groups: int
) -> None:
    setup = Setup(stage=stage, offload=offload, model=model, accum=accum, groups=groups)
    for read, applied in two_ranks.run(read_and_set_early, setup):
        assert torch.equal(read, torch.zeros(6))
        assert torch.equal(applied, torch.full((6,), 7.0)), "3 was set, 4 was added"


def step_past_the_engine() -> None:
    engine = build(Setup(), model=Few([4]))
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(1.0))
    with pytest.raises(
        RuntimeError, match=r"optimizer.step\(\) with an open request \(1 micro-batches.*call engine.step"
    ):
        engine.optimizer.step()
    engine.destroy()


def test_the_optimizer_does_not_end_requests_itself(two_ranks: RankGroup) -> None:
    two_ranks.run(step_past_the_engine)


def nan_with_clipping(offload: bool, requestzero: bool) -> list[torch.Tensor]:
    config = {**UNCHECKED_BF16, "gradient_clipping": 1.0}
    engine = build(Setup(offload=offload, model="bf16", accum="fp32", config=config), requestzero, model=Few([4, 4]))
    engine.module.weights[0].register_hook(lambda grad: grad * float("nan"))
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(100.0))
    engine.step()
    weights = module_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("offload", [False, True])
def test_an_unchecked_nan_still_clips_the_rest(two_ranks: RankGroup, offload: bool) -> None:
    for requestzero in (True, False) if is_deepspeed_since("0.19.8") else (True,):  # an older stock differs
        poisoned, other = two_ranks.run(nan_with_clipping, offload, requestzero)[0]
        assert poisoned.isnan().all()
        assert torch.equal(other, torch.zeros(4)), "as in DeepSpeed"
