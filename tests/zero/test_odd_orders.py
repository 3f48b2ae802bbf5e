"""Forwards and backwards in other orders than one after the other, and steps after an exception."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from requestzero.doctor.verify.training import Layers
from support.engines import build, masters
from support.grid import every_place, every_sum
from support.overflow_configs import overflow_config
from support.poison import interrupt_backward
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import applied_by, assert_exact_window, assert_sums
from support.windows import ALL, LR, Micro, backward, inputs_of, reference


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


def one_loss_of_two_forwards(setup: Setup, torch_style: bool) -> None:
    """Requests of one backward each, of two forwards whose losses are added, as in preference optimization."""
    engine = build(setup)
    for _ in range(2):
        pairs = [(Micro(ALL, seed), Micro((True, False, True, True, False), 10 + seed)) for seed in range(3)]
        for pair in pairs:
            engine.set_gradient_accumulation_boundary(True)
            loss = sum(loss_of(engine, micro) for micro in pair)
            if torch_style:
                loss.backward()
            else:
                engine.backward(loss)
        assert engine.update_window.micro_batches == len(pairs)
        assert_sums(applied_by(engine), [micro for pair in pairs for micro in pair])
    engine.destroy()


@every_place
@every_sum
@pytest.mark.parametrize("torch_style", [False, True])
def test_one_loss_of_two_forwards(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str, torch_style: bool
) -> None:
    setup = Setup(stage=stage, offload=offload, model=model, accum=accum)
    two_ranks.run(one_loss_of_two_forwards, setup, torch_style)


def two_forwards_dropped(setup: Setup) -> None:
    engine = build(setup)
    kept = [Micro(ALL, 1), Micro(ALL, 2)]
    for factor, micros in ((1.0, kept), (float("nan"), [Micro(ALL, 3), Micro(ALL, 4)])):
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(sum(loss_of(engine, micro) for micro in micros) * factor)
    assert len(engine.update_window.dropped) == 1
    assert_sums(applied_by(engine), kept)
    engine.destroy()


@every_place
@every_sum
def test_a_dropped_request_of_two_forwards(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str
) -> None:
    policy = overflow_config(model, on_overflow="drop_request")
    two_ranks.run(two_forwards_dropped, Setup(stage=stage, offload=offload, model=model, accum=accum, config=policy))


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
    assert_exact_window(engine, [Micro(ALL, 3), Micro(ALL, 4)])
    engine.destroy()


@every_place
@every_sum
def test_a_step_after_an_interrupted_first_backward(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str
) -> None:
    two_ranks.run(step_after_an_exception, Setup(stage=stage, offload=offload, model=model, accum=accum))


def backward_after_an_exception(setup: Setup) -> None:
    engine = build(setup)
    backward(engine, Micro(ALL, 1))
    interrupt_backward(engine)
    before = masters(engine)
    for go_on in (lambda: backward(engine, Micro(ALL, 3)), engine.end_request, engine.step):
        with pytest.raises(RuntimeError, match=r"a part of its gradients is reduced already: call zero_grad\(\)"):
            go_on()
    assert all(torch.equal(a, b) for a, b in zip(before, masters(engine), strict=True))
    engine.zero_grad()
    backward(engine, Micro(ALL, 4))
    assert_sums(applied_by(engine), [Micro(ALL, 4)])
    engine.destroy()


@every_sum
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("stage", "overlap"), [(1, True), (2, False), (2, True)])
@pytest.mark.parametrize("bucket", [8, 1_000])
def test_a_backward_after_an_interrupted_one_is_refused(
    two_ranks: RankGroup, stage: int, overlap: bool, offload: bool, model: str, accum: str, bucket: int
) -> None:
    """A part of the interrupted one would be added to it, uncounted."""
    zero = {"overlap_comm": overlap, "reduce_bucket_size": bucket}
    two_ranks.run(backward_after_an_exception, Setup(stage=stage, offload=offload, model=model, accum=accum, zero=zero))


def backward_after_an_exception_in_a_hook(setup: Setup) -> None:
    """The user's hook runs before the engine's, so that the first gradient stays on its parameter."""
    model, raises = Layers(), [False]

    def hook(param: torch.Tensor) -> None:
        if raises[0]:
            raise KeyError("interrupted")

    model.layers[-1].weight.register_post_accumulate_grad_hook(hook)
    engine = build(setup, model=model)
    backward(engine, Micro(ALL, 1))
    raises[0] = True
    with pytest.raises(KeyError, match="interrupted"):
        backward(engine, Micro(ALL, 2))
    raises[0] = False
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\)"):
        backward(engine, Micro(ALL, 3))
    engine.zero_grad()
    assert_exact_window(engine, [Micro(ALL, 3), Micro(ALL, 4)])
    engine.destroy()


@every_place
def test_a_backward_after_one_that_a_hook_has_interrupted(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    two_ranks.run(backward_after_an_exception_in_a_hook, Setup(stage=stage, offload=offload))


def load_nothing(folder: str) -> None:
    engine = build(Setup())
    backward(engine, Micro(ALL, 1))
    assert engine.load_checkpoint(folder)[0] is None
    assert engine.update_window.is_open
    assert_sums(applied_by(engine), [Micro(ALL, 1)])
    engine.destroy()


def test_loading_nothing_keeps_the_window(two_ranks: RankGroup, tmp_path: Any) -> None:
    two_ranks.run(load_nothing, str(tmp_path))
