"""``rank_dependent_parameters``: parameters that take part on some ranks only, exact against plain PyTorch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from support.engines import build, masters
from support.grid import PLACES, every_sum
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import difference
from support.windows import OUTS, Layers, inputs_of, values, wrong_updates

Uses = tuple[bool, ...]


@dataclass(frozen=True)
class Branch:
    """A micro-batch in which every rank uses parameters of its own, or none."""

    uses: tuple[Uses, ...]
    seed: int
    request_end: bool


def windows_of(world_size: int, seed: int) -> list[list[Branch]]:
    chance = random.Random(seed)

    def branch(number: int, request_end: bool) -> Branch:
        uses = [tuple(chance.random() < 0.5 for _ in OUTS) for _ in range(world_size)]
        uses[0] = uses[0] if number else (False,) * len(OUTS)
        return Branch(tuple(uses), seed * 100 + number, request_end)

    return [[branch(10 * window + i, i != 1) for i in range(4)] for window in range(3)]


def reference(windows: list[list[Branch]], world_size: int) -> list[list[torch.Tensor]]:
    """Plain PyTorch in fp64: per window each layer's gradient, summed over micro-batches, averaged over ranks."""
    model = Layers().double()
    expected = []
    for window in windows:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for branch in window:
            for rank, uses in enumerate(branch.uses):
                x, w = (value.double() for value in values(branch.seed, rank, world_size))
                (model(x.requires_grad_(), w, uses) / world_size).backward()
        expected.append([parameter.grad.clone() for parameter in model.parameters()])
    return expected


def apply_windows(setup: Setup, windows: list[list[Branch]]) -> list[list[torch.Tensor]]:
    """On this rank: for each window the applied gradient of every layer."""
    import deepspeed.comm as dist

    engine = build(setup)
    applied, after = [], masters(engine)
    for window in windows:
        before = after
        for branch in window:
            x, w = inputs_of(engine, branch.seed)
            engine.set_gradient_accumulation_boundary(branch.request_end)
            engine.backward(engine(x.requires_grad_(), w, branch.uses[dist.get_rank()]))
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        after = masters(engine)
        applied.append(difference(before, after))
    engine.destroy()
    return applied


def wrong_setups(setups: list[Setup], world_size: int) -> list[str]:
    windows = windows_of(world_size, 5)
    expected = reference(windows, world_size)
    return [str(setup) for setup in setups if wrong_updates(apply_windows(setup, windows), expected)]


ON = {"requestzero": {"rank_dependent_parameters": True}}
SETUPS = [Setup(stage=stage, offload=offload, config=ON) for stage, offload in PLACES]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"round_robin_gradients": True},
    {"reduce_scatter": False},
    {"contiguous_gradients": False},
    {"reduce_bucket_size": 20},
    {"overlap_comm": True},
    {"overlap_comm": True, "reduce_bucket_size": 20},
    {"use_multi_rank_bucket_allreduce": False},
]


@every_sum
def test_every_reduction_option_on_two_ranks(two_ranks: RankGroup, model: str, accum: str) -> None:
    setups = [replace(place, model=model, accum=accum, zero=zero) for place in SETUPS for zero in OPTIONS]
    assert two_ranks.run(wrong_setups, setups, 2) == [[], []]


def test_three_ranks_and_several_groups(three_ranks: RankGroup) -> None:
    setups = [replace(place, groups=groups) for place in SETUPS for groups in (1, 3)]
    assert three_ranks.run(wrong_setups, setups, 3) == [[]] * 3


def same_order_for_all(setup: Setup) -> int:
    """Agreements in a window whose backwards use other parameters each: that of the request and that of the step."""
    engine = build(setup)
    windows = windows_of(2, 7)
    channel, counts = engine.agreement._channel, []
    for window in windows:
        before = channel.rounds
        engine.begin_request(micro_batches=len(window), window_end=True)
        for position, branch in enumerate(window):
            x, w = values(branch.seed, 0, 2)
            engine.set_gradient_accumulation_boundary(position == len(window) - 1)
            engine.backward(engine(x.requires_grad_(), w, branch.uses[torch.distributed.get_rank()]))
        engine.step()
        counts.append(channel.rounds - before)
    engine.destroy()
    return counts[-1]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_fixed_order_needs_no_agreement(two_ranks: RankGroup, stage: int) -> None:
    assert two_ranks.run(same_order_for_all, replace(SETUPS[0], stage=stage)) == [1, 1]
