"""The harness itself: a rank that raises, dies or hangs fails the test, with what that rank had to say."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from support.ranks import RankError, RankGroup


@pytest.fixture
def group() -> Iterator[RankGroup]:
    ranks = RankGroup(2)
    yield ranks
    ranks.stop()


def misbehave(how: str) -> int:
    import deepspeed.comm as dist
    import torch

    if how != "no" and dist.get_rank() == 1:
        if how == "raise":
            raise KeyError("on rank one only")
        if how == "die":
            os._exit(7)
        time.sleep(3600)
    if how != "no":
        dist.all_reduce(torch.ones(1))  # waits for the other rank
    return dist.get_rank()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "misbehave on rank 1:(.|\n)*KeyError: 'on rank one only'"),
        ("die", r"misbehave on rank 1:\nthe process died \(exit code 7\)"),
        ("hang", r"misbehave: ranks \[0, 1\] were not done after 12 s(.|\n)*rank 1 was at:(.|\n)*in misbehave"),
    ],
)
def test_a_failing_rank_fails_the_test(group: RankGroup, how: str, message: str) -> None:
    assert group.run(misbehave, "no") == [0, 1]  # starting takes longer on a busy machine than the time allowed below
    start = time.monotonic()
    with pytest.raises(RankError, match=message):
        group.run(misbehave, how, timeout=12)
    assert time.monotonic() - start < 60
    assert group.run(misbehave, "no") == [0, 1], "a new group starts by itself"


def build_stage_3() -> bool:
    """Build an engine of DeepSpeed's stage 3; return if it has replaced PyTorch's linear function."""
    import deepspeed
    import torch

    linear = torch.nn.functional.linear
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)[0].destroy()
    return torch.nn.functional.linear is not linear


def linear_name() -> str:
    import torch

    return torch.nn.functional.linear.__name__


def test_stage_3_leaves_nothing_behind(group: RankGroup) -> None:
    before = group.run(linear_name)
    assert group.run(build_stage_3) == [True, True]
    assert group.run(linear_name) == before
