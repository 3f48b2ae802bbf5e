"""A parameter that two segments of reentrant checkpointing use: its gradient arrives in two parts of one backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from support.engines import build, masters
from support.grid import every_place, every_sum
from support.models import WIDTH
from support.ranks import RankGroup
from support.setup import Setup
from support.windows import LR


class Interleaved(torch.nn.Module):
    """Of an input x the gradients are 5x and 2x; that of ``twice`` comes in parts, with ``once`` between them."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = torch.nn.Parameter(torch.zeros(WIDTH))
        self.once = torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = ((self.twice, 1.0), (self.once, 2.0), (self.twice, 4.0))
        return sum(
            (checkpoint(lambda w, y: (w * y).sum(), weight, x * factor, use_reentrant=True) for weight, factor in parts),
            torch.zeros((), device=x.device),
        )


def two_requests(setup: Setup, requestzero: bool) -> list[list[float]]:
    """The updates of a window of a request of two micro-batches, 1 and 2, and a request of one, 4; over the rate."""
    engine: Any = build(setup, requestzero, model=Interleaved())
    dtype = engine.module.once.dtype
    for value, end in ((1.0, False), (2.0, True), (4.0, True)):
        engine.set_gradient_accumulation_boundary(end)
        x = torch.full((WIDTH,), value, dtype=dtype, device=engine.device, requires_grad=True)
        engine.backward(engine(x))
    engine.step()
    updates = [(each / -LR).tolist() for each in masters(engine)]
    engine.destroy()
    return updates


EXACT = [[5.0 * 7] * WIDTH, [2.0 * 7] * WIDTH]


@every_place
@every_sum
@pytest.mark.parametrize("bucket", [WIDTH, 1_000], ids=["own buckets", "one bucket"])
@pytest.mark.parametrize("overlap", [False, True])
def test_both_parts_are_added(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str, bucket: int, overlap: bool
) -> None:
    zero = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "overlap_comm": overlap}
    setup = Setup(stage=stage, offload=offload, model=model, accum=accum, zero=zero)
    assert two_ranks.run(two_requests, setup, True) == [EXACT] * 2


def outcome(setup: Setup) -> str:
    try:
        return str(two_requests(setup, False))
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("bucket", [WIDTH, 1_000], ids=["own buckets", "one bucket"])
def test_stock_refuses_them_or_loses_a_part(one_rank: RankGroup, bucket: int) -> None:
    """One rank is enough to see it."""
    setup = Setup(stage=2, zero={"reduce_bucket_size": bucket, "allgather_bucket_size": bucket})
    (found,) = one_rank.run(outcome, setup)
    assert found != str(EXACT)
    print(found)
