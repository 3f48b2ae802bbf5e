"""A parameter that two segments of reentrant checkpointing use: its gradient arrives in two parts of one backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from support.engines import build, masters
from support.failures import assert_fails
from support.grid import every_place, every_sum
from support.models import WIDTH
from support.ranks import RankGroup
from support.setup import Setup
from support.windows import LR


def inner_product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (weight * x).sum()


class Interleaved(torch.nn.Module):
    """Of an input x the gradients are 5x and 2x; that of ``twice`` comes in parts, with ``once`` between them."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = torch.nn.Parameter(torch.zeros(WIDTH))
        self.once = torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = ((self.twice, 1.0), (self.once, 2.0), (self.twice, 4.0))
        # A weight that were an argument of its segments would get the sum of its parts, once.
        products = [checkpoint(partial(inner_product, weight), x * by, use_reentrant=True) for weight, by in parts]
        return torch.stack(products).sum()


def updates(setup: Setup, requestzero: bool, ends: dict[float, bool]) -> list[list[float]]:
    """The updates of a window of these inputs, each with whether its request ends with it; divided by the rate."""
    engine: Any = build(setup, requestzero, model=Interleaved())
    dtype = engine.module.once.dtype
    for value, end in ends.items():
        engine.set_gradient_accumulation_boundary(end)
        x = torch.full((WIDTH,), value, dtype=dtype, device=engine.device, requires_grad=True)
        engine.backward(engine(x))
    engine.step()
    found = [(each / -LR).tolist() for each in masters(engine)]
    engine.destroy()
    return found


def exact(total: float) -> list[list[float]]:
    return [[5.0 * total] * WIDTH, [2.0 * total] * WIDTH]


every_bucket = pytest.mark.parametrize("bucket", [WIDTH, 1_000], ids=["own buckets", "one bucket"])


@every_place
@every_sum
@every_bucket
@pytest.mark.parametrize("overlap", [False, True])
def test_both_parts_are_added(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str, bucket: int, overlap: bool
) -> None:
    zero = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "overlap_comm": overlap}
    setup = Setup(stage=stage, offload=offload, model=model, accum=accum, zero=zero)
    ends = {1.0: False, 2.0: True, 4.0: True}
    assert two_ranks.run(updates, setup, True, ends) == [exact(7.0)] * 2


@every_place
@every_bucket
def test_stock_fails(one_rank: RankGroup, stage: int, offload: bool, bucket: int) -> None:
    """DeepSpeed adds both parts of a single backward at stage 1, and loses an earlier request; stage 2 raises."""
    setup = Setup(stage=stage, offload=offload, zero={"reduce_bucket_size": bucket, "allgather_bucket_size": bucket})
    if stage == 2:
        message = "^AssertionError: The parameter twice has already been reduced"
        assert_fails(one_rank, message, updates, setup, False, {1.0: True})
        return
    assert one_rank.run(updates, setup, False, {1.0: True}) == [exact(1.0)]
    assert one_rank.run(updates, setup, False, {1.0: True, 4.0: True}) == [exact(4.0)]
