"""``offload_optimizer.ratio`` below 1 (Twin-Flow): refused at every stage, and what DeepSpeed makes of it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

import requestzero
from support.engines import build, masters
from support.ranks import RankGroup
from support.setup import Setup
from support.windows import ALL, Micro, backward


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_part_of_the_optimizer_is_not_left_on_the_accelerator(stage: int) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu", "ratio": 0.25}}
    message = r"offload_optimizer\.ratio=0\.25 was asked \(Twin-Flow\).*no learning-rate schedule.*Leave it out"
    with pytest.raises(ValueError, match=message):
        requestzero.initialize(model=torch.nn.Linear(1, 1), config={"zero_optimization": zero})


def test_all_of_it_may_be_offloaded(one_rank: RankGroup) -> None:
    assert one_rank.run(trained, {"device": "cpu", "ratio": 1.0}, True)[0][0] == [False] * 5


def trained(offload_optimizer: dict[str, Any], requestzero: bool) -> tuple[list[bool], int]:
    """Which weights a step at a learning rate of 0 moves, and the number of sub-groups of which a checkpoint has state.

    The accelerator is the CPU, so that it needs another name to be told from the host.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT

    zero = {"offload_optimizer": offload_optimizer, "sub_group_size": 1}
    with patch.object(get_accelerator(), "_name", "cpu:0"):
        engine = build(Setup(stage=3, optimizer="cpu_adam", zero=zero), requestzero)
    backward(engine, Micro(ALL, 0))
    engine.step()
    saved = engine.optimizer.state_dict()[OPTIMIZER_STATE_DICT]["state"]
    before = masters(engine)
    engine.optimizer.set_lr(0.0)
    backward(engine, Micro(ALL, 1))
    engine.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, masters(engine), strict=True)]
    engine.destroy()
    return moved, len(saved)


def test_what_deepspeed_makes_of_it(one_rank: RankGroup) -> None:
    """Two of five sub-groups go on at the first learning rate, and a checkpoint lacks their state."""
    ((moved, saved),) = one_rank.run(trained, {"device": "cpu", "ratio": 0.5}, False)
    assert moved == [True, True, False, False, False]
    assert saved == 3
