"""Forwards and backwards in other orders than one after the other, and steps after an exception."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.engines import build, masters
from support.grid import every_place, every_sum
from support.poison import interrupt_backward
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import applied_by, assert_sums
from support.windows import ALL, LR, Micro, backward, inputs_of


def loss_of(engine: Any, micro: Micro) -> torch.Tensor:
    x, w = inputs_of(engine, micro.seed)
    return engine(x.requires_grad_(), w, micro.uses)


def forwards_first(setup: Setup, ends: list[bool], torch_style: bool) -> None:
    """Two forwards, then their backwards, then one more of each."""
    engine = build(setup)
    for _ in range(2):
        micros = [Micro(ALL, seed, end) for seed, end in enumerate(ends)]
        losses = [loss_of(engine, micro) for micro in micros[:-1]]
        for micro in micros:
            loss = losses.pop(0) if losses else loss_of(engine, micro)
            engine.set_gradient_accumulation_boundary(micro.request_end)
            if torch_style:
                loss.backward()
            else:
                engine.backward(loss)
        assert engine.update_window.micro_batches == len(ends)
        assert_sums(applied_by(engine), micros)
    engine.destroy()


@every_place
@every_sum
@pytest.mark.parametrize("ends", [[True, False, True], [True, True, True]])
@pytest.mark.parametrize("torch_style", [False, True])
def test_several_forwards_before_their_backwards(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str, ends: list[bool], torch_style: bool
) -> None:
    two_ranks.run(forwards_first, Setup(stage=stage, offload=offload, model=model, accum=accum), ends, torch_style)


def set_in_an_absent_group(setup: Setup, end: bool) -> torch.Tensor:
    """A group that has not taken part in the window is set to 3, then a request adds to it."""
    from deepspeed.utils import safe_set_full_grad

    engine = build(setup)
    parameter = list(engine.module.parameters())[1]
    backward(engine, Micro(ALL, 1))
    engine.step()
    before = masters(engine)[1]
    backward(engine, Micro((True, False, True, False, True), 2, end))
    safe_set_full_grad(parameter, torch.full_like(parameter, 3.0, dtype=torch.float32))
    backward(engine, Micro(ALL, 3))
    engine.step()
    applied = (before - masters(engine)[1]) / LR
    engine.destroy()
    return applied


@every_sum
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("retain", [False, True])
def test_a_gradient_set_in_an_absent_group_is_kept(
    two_ranks: RankGroup, stage: int, retain: bool, model: str, accum: str
) -> None:
    from support.windows import reference

    setup = Setup(stage=stage, offload=True, model=model, accum=accum, groups=2, retain=retain)
    added = reference([[Micro(ALL, 3)]], 2)[0][1]
    for end in (True, False) if stage == 2 else (True,):
        for applied in two_ranks.run(set_in_an_absent_group, setup, end):
            assert torch.equal(applied.double(), added + 3)


def step_after_an_exception(setup: Setup) -> None:
    engine = build(setup)
    interrupt_backward(engine)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    assert not engine.was_step_applied()
    micros = [Micro(ALL, 3), Micro(ALL, 4)]
    for micro in micros:
        backward(engine, micro)
    assert_sums(applied_by(engine), micros)
    engine.destroy()


@every_place
@every_sum
def test_a_step_after_an_interrupted_first_backward(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str
) -> None:
    two_ranks.run(step_after_an_exception, Setup(stage=stage, offload=offload, model=model, accum=accum))


def load_nothing(folder: str) -> None:
    engine = build(Setup())
    backward(engine, Micro(ALL, 1))
    assert engine.load_checkpoint(folder)[0] is None
    assert engine.update_window.is_open
    assert_sums(applied_by(engine), [Micro(ALL, 1)])
    engine.destroy()


def test_loading_nothing_keeps_the_window(two_ranks: RankGroup, tmp_path: Any) -> None:
    two_ranks.run(load_nothing, str(tmp_path))
