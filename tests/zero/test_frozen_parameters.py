"""Parameters that are frozen for a while: as in plain PyTorch, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.engines import build, module_weights
from support.failures import assert_fails
from support.grid import every_stage
from support.muon import batch, build_muon
from support.ranks import RankGroup
from support.setup import Setup
from support.windows import LR

PHASES = ((True, False), (True, True), (False, True), (True, True))
"""Whether each of two parameters is trained, in one phase after another."""


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.arange(5.0))
        self.second = torch.nn.Parameter(torch.arange(3.0) - 1)

    def forward(self, x: float) -> torch.Tensor:
        return (self.first * self.first).sum() * x + (self.second * self.second).sum() / (1 + x)


def phases(module: Two, update: Any) -> None:
    for number, trained in enumerate(PHASES):
        module.first.requires_grad_(trained[0])
        module.second.requires_grad_(trained[1])
        for step in range(3):
            update(0.25 + number + step)


def plain(name: str, options: dict[str, Any]) -> list[float]:
    module = Two()
    optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name](module.parameters(), lr=LR, **options)

    def update(x: float) -> None:
        optimizer.zero_grad()
        module(x).backward()
        optimizer.step()

    phases(module, update)
    return torch.cat([module.first, module.second]).tolist()


def ours(setup: Setup, options: dict[str, Any]) -> list[float]:
    engine = build(setup, model=Two(), **options)

    def update(x: float) -> None:
        engine.backward(engine(x))
        engine.step()

    phases(engine.module, update)
    result = torch.cat(module_weights(engine)).tolist()
    engine.destroy()
    return result


@every_stage
@pytest.mark.parametrize("options", [{"momentum": 0.5, "weight_decay": 0.25}, {"momentum": 0.5}], ids=str)
def test_frozen_parameters_stay(two_ranks: RankGroup, stage: int, offload: bool, options: dict[str, Any]) -> None:
    expected = plain("sgd", options)
    assert max(map(abs, expected)) < 10
    for got in two_ranks.run(ours, Setup(stage=stage, offload=offload), options):
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)


def moved_while_frozen(setup: Setup) -> list[bool]:
    engine = build(setup, model=Two(), weight_decay=0.5)
    for x in (1.0, 2.0):
        engine.backward(engine(x))
        engine.step()
    engine.module.first.requires_grad_(False)
    before = module_weights(engine)
    for x in (1.0, 2.0):
        engine.backward(engine(x))
        engine.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, module_weights(engine), strict=True)]
    engine.destroy()
    return moved


@every_stage
def test_frozen_parameters_stay_under_adamw(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    setup = Setup(stage=stage, offload=offload, model="bf16", optimizer="adamw")
    assert two_ranks.run(moved_while_frozen, setup) == [[False, True]] * 2


def unfrozen_late(setup: Setup) -> None:
    model = Two()
    model.second.requires_grad_(False)
    engine = build(setup, model=model)
    engine.backward(engine(1.0))
    engine.step()
    torch.nn.functional.mse_loss(model.second, model.first[:3]).backward(inputs=[model.first])
    model.second.requires_grad_(True)
    engine.backward(engine(1.0))


@every_stage
def test_what_was_frozen_at_the_start_is_refused(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    message = "^RuntimeError: Parameter 'second' was frozen when the engine was built.*Let it require grad"
    assert_fails(two_ranks, message, unfrozen_late, Setup(stage=stage, offload=offload))


def trained_without_the_engine_afterwards(setup: Setup) -> float:
    model = Two()
    model.second.requires_grad_(False)
    engine = build(setup, model=model)
    engine.backward(engine(1.0))
    engine.zero_grad()
    model.second.requires_grad_(True)
    model(1.0).backward()
    engine.zero_grad()
    other = build(setup, model=model)
    other.backward(other(1.0))
    other.step()
    other.destroy()
    return float(model.second[2])


def test_another_engine_may_train_it(two_ranks: RankGroup) -> None:
    assert two_ranks.run(trained_without_the_engine_afterwards, Setup()) == [1 - LR] * 2


def frozen_under_muon(stage: int, offload: bool) -> list[bool]:
    """True for what has moved: a frozen matrix, one that is not frozen, and the momentum of the frozen one."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    zero = Setup(stage=stage, offload=offload, zero={"reduce_scatter": False}).deepspeed_config()["zero_optimization"]
    engine = build_muon(stage, offload, "fp32", "fp32", zero_optimization=zero)
    has_momentum = stage == 3 or offload  # else DeepSpeed keeps it by whole matrices, and moves it
    frozen, trained = engine.module.b.weight, engine.module.a.weight

    def kept() -> list[torch.Tensor]:
        found = [safe_get_full_fp32_param(each) for each in (frozen, trained)]
        if has_momentum:
            found.append(safe_get_full_optimizer_state(frozen, "momentum_buffer"))
        return [value.clone() for value in found if value is not None]

    before: list[torch.Tensor] = []
    for window in range(3):
        engine.backward(engine(batch(engine, window, 0)))
        engine.step()
        if window == 0:
            before = kept()
            frozen.requires_grad_(False)
    frozen.requires_grad_(True)  # of others DeepSpeed tells nothing
    moved = [not torch.equal(a, b) for a, b in zip(before, kept(), strict=True)]
    engine.destroy()
    return moved


@every_stage
def test_frozen_parameters_stay_under_muon(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    keeps_momentum = stage == 3 or offload
    expected = [False, True, *([False] if keeps_momentum else [])]
    assert two_ranks.run(frozen_under_muon, stage, offload) == [expected] * 2


def norms_without_b(stage: int, offload: bool) -> list[float]:
    """The norm of a step in which a matrix is frozen that has momentum, and where it has never had a gradient."""
    zero = Setup(stage=stage, offload=offload, zero={"reduce_scatter": False}).deepspeed_config()["zero_optimization"]
    norms = []
    for freezes in (True, False):
        engine = build_muon(stage, offload, "fp32", "fp32", zero_optimization=zero)
        for window in range(2):
            engine.module.b.requires_grad_(not freezes or window == 0)
            engine.backward(engine(batch(engine, window, 0), use_b=freezes))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        engine.destroy()
    return norms


@every_stage
def test_the_norm_under_muon_leaves_out_what_is_frozen(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    for frozen, absent in two_ranks.run(norms_without_b, stage, offload):
        assert frozen == pytest.approx(absent, rel=1e-6)
