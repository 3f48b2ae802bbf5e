"""Gradients that share memory: autograd hands one tensor to several parameters, as views of each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist

from support.engines import build, masters
from support.grid import every_place, every_sum
from support.models import WIDTH
from support.ranks import RankGroup
from support.setup import Setup
from support.windows import LR


class Shared(torch.nn.Module):
    """Of an input x the gradients are x, x and 2x; all of them come from one tensor, and the last is made from it."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Parameter(torch.zeros(WIDTH))
        self.right = torch.nn.Parameter(torch.zeros(WIDTH))
        self.behind = torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (self.behind * 2.0).view(2, -1)
        return ((self.left.view(2, -1) + self.right.view(2, -1) + hidden) * x).sum()


def updates(setup: Setup) -> list[list[float]]:
    """The updates of a window of four requests of one micro-batch, divided by the rate; ranks have inputs 1 : 3.

    Of one, since PyTorch itself adds a second backward to gradients that share memory as often as they are shared.
    """
    engine: Any = build(setup, model=Shared())
    dtype, factor = engine.module.left.dtype, 1.0 + 2.0 * dist.get_rank()
    for value in (1.0, 2.0, 4.0, 8.0):
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(torch.full((2, WIDTH // 2), value * factor, dtype=dtype, device=engine.device)))
    engine.step()
    found = [(each / -LR).tolist() for each in masters(engine)]
    engine.destroy()
    return found


@every_place
@every_sum
@pytest.mark.parametrize("options", [{}, {"use_multi_rank_bucket_allreduce": False}], ids=["all", "owners"])
def test_a_gradient_larger_than_a_bucket_does_not_change_another(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str, options: dict[str, Any]
) -> None:
    setup = Setup(stage, offload, model, accum, zero={"reduce_bucket_size": WIDTH // 2, **options})
    expected = [[30.0] * WIDTH, [30.0] * WIDTH, [60.0] * WIDTH]
    assert two_ranks.run(updates, setup) == [expected] * 2
