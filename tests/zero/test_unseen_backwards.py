"""Backwards that do not start at an output of the engine count, as in plain PyTorch, or raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.engines import build
from support.failures import assert_fails
from support.fp16 import fp16_where_needed
from support.grid import every_place, every_sum
from support.poison import interrupt_backward
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import applied_by, assert_sums
from support.windows import ALL, Micro, backward, inputs_of

SOME = (True, False, True, False, False)
OTHERS = (False, True, True, True, False)
SEEN, UNSEEN, END = "seen", "unseen", "end of request"
ORDERS: dict[str, tuple[list[tuple[str, Micro]], int]] = {
    "alone": ([(UNSEEN, Micro(SOME, 1)), (UNSEEN, Micro(OTHERS, 2))], 1),
    "before": ([(UNSEEN, Micro(SOME, 1)), (SEEN, Micro(OTHERS, 2, False))], 1),
    "after": ([(SEEN, Micro(SOME, 1, False)), (UNSEEN, Micro(OTHERS, 2))], 1),
    "between": ([(SEEN, Micro(SOME, 1, False)), (UNSEEN, Micro(ALL, 2)), (SEEN, Micro(OTHERS, 3))], 2),
    "after the request": ([(SEEN, Micro(SOME, 1)), (UNSEEN, Micro(OTHERS, 2))], 2),
    "two requests": ([(UNSEEN, Micro(SOME, 1)), (END, Micro(SOME, 0)), (UNSEEN, Micro(OTHERS, 2))], 2),
}
"""Orders of backwards, and the micro-batches that they are."""


def unseen_backward(engine: Any, micro: Micro) -> None:
    """Run a backward of the module, without the engine."""
    x, w = inputs_of(engine, micro.seed)
    engine.module(x.requires_grad_(), w, micro.uses).backward()


def assert_every_order(setup: Setup) -> None:
    engine = build(setup)
    for order, count in ORDERS.values():
        for kind, micro in order:
            if kind == END:
                engine.end_request()
            else:
                (backward if kind == SEEN else unseen_backward)(engine, micro)
        window = engine.update_window
        engine.set_gradient_accumulation_boundary(True)
        assert_sums(applied_by(engine), [micro for kind, micro in order if kind != END])
        assert engine.was_step_applied()
        assert window.micro_batches == count
    engine.destroy()


@every_place
@every_sum
def test_every_order(two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str) -> None:
    two_ranks.run(assert_every_order, Setup(stage=stage, offload=offload, model=model, accum=accum))


@pytest.mark.parametrize(
    "setup",
    [
        Setup(stage=2, zero={"reduce_bucket_size": 20}),
        Setup(stage=2, zero={"overlap_comm": True, "reduce_bucket_size": 8}),
        Setup(stage=1, zero={"overlap_comm": True}),
        Setup(stage=1, zero={"contiguous_gradients": False}),
        Setup(stage=2, config={"overflow": {"on_overflow": "drop_request", "check_grad_overflow": True}}),
        Setup(stage=2, checkpointing="reentrant"),
        Setup(stage=1, checkpointing="reentrant", model="bf16"),
    ],
    ids=str,
)
def test_every_way_of_reduction(two_ranks: RankGroup, setup: Setup) -> None:
    two_ranks.run(assert_every_order, setup)


def discarded(setup: Setup) -> None:
    engine = build(setup)
    unseen_backward(engine, Micro(SOME, 1))
    with pytest.raises(RuntimeError, match=r"save_checkpoint\(\) inside a request"):
        engine.save_checkpoint("/nowhere")
    engine.zero_grad()
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    assert not engine.was_step_applied()
    unseen_backward(engine, Micro(SOME, 2))
    engine.module.zero_grad()  # as in plain PyTorch, the gradients that wait are gone
    backward(engine, Micro(OTHERS, 3))
    assert_sums(applied_by(engine), [Micro(OTHERS, 3)])
    engine.destroy()


@every_place
def test_zero_grad_discards_them(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    two_ranks.run(discarded, Setup(stage=stage, offload=offload))


def after_an_interruption(setup: Setup) -> None:
    engine = build(setup)
    backward(engine, Micro(ALL, 1))
    interrupt_backward(engine)
    engine.zero_grad()
    for seed in (3, 4):
        unseen_backward(engine, Micro(SOME, seed))
        engine.set_gradient_accumulation_boundary(True)
        assert_sums(applied_by(engine), [Micro(SOME, seed)])
    engine.destroy()


@every_place
def test_after_an_interrupted_backward_that_is_discarded(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    """DeepSpeed took its gradients for the rest of the interrupted backward, which never ended."""
    two_ranks.run(after_an_interruption, Setup(stage=stage, offload=offload))


class BackwardInForward(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.weight * x).sum()
        loss.backward()
        return loss.detach()


def updated_in_forward(setup: Setup) -> list[float]:
    import deepspeed.comm as dist

    engine = build(setup, model=BackwardInForward(), lr=1.0)
    for value in (2.0, 4.0):
        engine(torch.full((6,), value * (1 + dist.get_rank())))
        engine.step()
    weight: list[float] = engine.module.weight.tolist()
    engine.destroy()
    return weight


@every_place
def test_a_backward_within_the_forward(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    assert two_ranks.run(updated_in_forward, Setup(stage=stage, offload=offload)) == [[-9.0] * 6] * 2


def direct_backward_after_an_exception(setup: Setup) -> None:
    """The loss is of an output of the engine; nothing calls ``engine.backward``."""
    engine = build(setup)
    interrupt_backward(engine)
    x, w = inputs_of(engine, 3)
    if setup.stage == 2:
        with pytest.raises(RuntimeError, match=r"a part of its gradients is reduced already: call zero_grad\(\)"):
            engine(x, w, ALL).backward()
    engine.zero_grad()
    for _ in range(2):
        engine(x, w, ALL).backward()
        assert engine.update_window.micro_batches == 1
        engine.set_gradient_accumulation_boundary(True)
        assert_sums(applied_by(engine), [Micro(ALL, 3)])
    engine.destroy()


@every_place
def test_a_direct_backward_after_an_interrupted_one(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    two_ranks.run(direct_backward_after_an_exception, Setup(stage=stage, offload=offload))


class Early(torch.nn.Module):
    """Raises in its backward before any gradient has come, if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
        product = self.weight * x
        if fails:
            product.register_hook(lambda grad: (_ for _ in ()).throw(KeyError("interrupted")))
        return product.sum()


def direct_backward_after_an_early_exception(setup: Setup) -> list[float]:
    engine = build(setup, model=Early(), lr=1.0)
    with pytest.raises(KeyError):
        engine.backward(engine(torch.ones(6), True))
    engine(torch.ones(6), False).backward()
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    weight: list[float] = engine.module.weight.tolist()
    engine.destroy()
    return weight


@every_place
def test_a_direct_backward_after_one_without_gradients(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    setup = Setup(stage=stage, offload=offload)
    assert two_ranks.run(direct_backward_after_an_early_exception, setup) == [[-1.0] * 6] * 2


def unscaled(setup: Setup, scales: bool) -> list[list[float]]:
    with fp16_where_needed("fp16"):
        engine = build(setup)
        x, w = inputs_of(engine, 1)
        loss = engine.module(x, w, ALL)
        (engine.scale(loss) if scales else loss).backward()
        engine.set_gradient_accumulation_boundary(True)
        applied = applied_by(engine)
        assert_sums(applied, [Micro(ALL, 1)])
        engine.destroy()
    return [gradient.tolist() for gradient in applied]


def test_a_loss_scale_is_asked_for(two_ranks: RankGroup) -> None:
    setup = Setup(model="fp16", config={"fp16": {"enabled": True, "loss_scale": 8}})
    assert_fails(
        two_ranks, "^RuntimeError: A backward that does not start at an output.* the loss scale", unscaled, setup, False
    )
    two_ranks.run(unscaled, setup, True)
