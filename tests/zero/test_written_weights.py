"""Weights that a user writes between steps count, as they do in plain PyTorch: the masters take them over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.engines import build, masters
from support.failures import assert_fails
from support.grid import PLACES, every_place, every_sum
from support.poison import poisoned_backward
from support.ranks import RankGroup
from support.setup import Setup
from support.windows import ALL, Micro, backward
from support.written_weights import (
    COUNTED,
    EVERY,
    Write,
    data_in_place,
    micro,
    saved_and_loaded,
    window,
    wrong_after_writes,
)


@every_sum
@every_place
def test_every_write_counts(two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str) -> None:
    setup = Setup(stage=stage, offload=offload, model=model, accum=accum)
    assert two_ranks.run(wrong_after_writes, setup, EVERY) == [[], []]


def wrong_setups(setups: list[Setup], writes: list[Write]) -> list[tuple[str, list[str]]]:
    return [(str(setup), wrong) for setup in setups if (wrong := wrong_after_writes(setup, writes))]


def test_layouts_of_the_partition(three_ranks: RankGroup) -> None:
    zero = [{"round_robin_gradients": True}, {"parameter_alignment": True}, {}]
    setups = [Setup(stage=s, offload=o, model="bf16", groups=2, zero=z) for z in zero for s, o in PLACES[1:3]]
    assert three_ranks.run(wrong_setups, setups, EVERY) == [[]] * 3


def test_without_comparison_only_what_autograd_counts(two_ranks: RankGroup) -> None:
    setups = [
        Setup(stage=s, offload=o, model="bf16", config={"requestzero": {"compare_weights": False}}) for s, o in PLACES
    ]
    assert two_ranks.run(wrong_setups, setups, COUNTED) == [[], []]
    for wrong in two_ranks.run(wrong_setups, setups, [data_in_place]):
        assert wrong == [(str(setup), ["data_in_place"] * 2) for setup in setups]


def set_masters(setup: Setup) -> list[list[float]]:
    """First weights of the masters after: setting them; then an update without gradient; the same after a write too."""
    from deepspeed.utils import safe_set_full_fp32_param

    engine = build(setup)
    first, second = list(engine.module.parameters())[:2]
    rows = []
    for write in (False, True):
        for parameter in (first, second):
            safe_set_full_fp32_param(parameter, torch.full(parameter.shape, 5.0))
        if write:
            with torch.no_grad():
                first.fill_(7.0)
            second.data.view(-1)[0] = 7.0
        rows.append([float(weight.view(-1)[0]) for weight in masters(engine)[:2]])
        backward(engine, Micro((False, False, *ALL[2:]), 1))
        engine.step()
        rows.append([float(weight.view(-1)[0]) for weight in masters(engine)[:2]])
    engine.destroy()
    return rows


@pytest.mark.parametrize("compare", [False, True])
def test_masters_that_the_user_sets_win_unless_the_weight_is_written_later(two_ranks: RankGroup, compare: bool) -> None:
    setup = Setup(model="bf16", config={"requestzero": {"compare_weights": compare}})
    for rows in two_ranks.run(set_masters, setup):
        # A write through .data cannot be told from the masters' being set.
        assert rows == [[5.0, 5.0], [5.0, 5.0], [5.0, 5.0], [7.0, 5.0]]


def set_before_no_update(setup: Setup, folder: str, skips: bool) -> list[float]:
    """Set masters; a step that is skipped, or a checkpoint; an update. First elements of what the masters are."""
    from deepspeed.utils import safe_set_full_fp32_param

    engine = build(setup)
    window(engine, 0)
    first, second = list(engine.module.parameters())[:2]
    for parameter in (first, second):
        safe_set_full_fp32_param(parameter, torch.full(parameter.shape, 5.0))
    if skips:
        poisoned_backward(engine, micro(1), float("inf"), rank=0)
        engine.step()
        assert not engine.was_step_applied()
    else:
        engine.save_checkpoint(folder)
    with torch.no_grad():
        second.fill_(7.0)  # later than its master, so it wins
    backward(engine, Micro((False, False, *ALL[2:]), 2))
    engine.step()
    assert engine.was_step_applied()
    left = [float(weight.view(-1)[0]) for weight in masters(engine)[:2]]
    engine.destroy()
    return left


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("compare", [False, True])
def test_masters_that_the_user_sets_outlast_a_skipped_step_and_a_save(
    two_ranks: RankGroup, tmp_path: Path, compare: bool, skips: bool
) -> None:
    setup = Setup(model="bf16", config={"requestzero": {"compare_weights": compare}})
    assert two_ranks.run(set_before_no_update, setup, str(tmp_path), skips) == [[5.0, 7.0]] * 2


@pytest.mark.parametrize("offload", [False, True])
def test_checkpoints_hold_what_was_written(two_ranks: RankGroup, tmp_path: Path, offload: bool) -> None:
    assert two_ranks.run(saved_and_loaded, Setup(offload=offload), str(tmp_path)) == [True, True]


def another_shape(setup: Setup) -> None:
    engine = build(setup)
    backward(engine, micro(0))
    weight = next(engine.module.parameters())
    weight.data = weight.data.new_zeros(2, 2)
    engine.step()


def test_another_shape_is_an_error(two_ranks: RankGroup) -> None:
    assert_fails(
        two_ranks, r"^ValueError: A parameter of shape .* has the shape \(2, 2\) since", another_shape, Setup()
    )
