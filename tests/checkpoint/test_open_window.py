"""A window that was saved open goes on with another number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoint_tool import command
from support.failures import assert_fails
from support.ranks import RankGroup
from support.setup import Setup
from support.shared_data import ROWS, run_rows

BEFORE, AFTER = range(ROWS), range(ROWS, 2 * ROWS)
"""Rows of the window, before the checkpoint and after it."""
ON_DEVICE = Setup(2, model="fp32", groups=2)
OFFLOADED = Setup(2, True, model="bf16", groups=2)
SHARDED = Setup(3, model="bf16", optimizer="adamw")


def step(engine: Any, how: str) -> None:
    import deepspeed.comm as dist

    by_number = {"divisor": 2 * ROWS / dist.get_world_size()}
    engine.step(**(by_number if how == "divisor" else {"normalization": how}))


def begin(setup: Setup, how: str, folder: str) -> list[torch.Tensor]:
    """Save inside the second of three windows, and go on; the master weights."""
    from support.engines import build, masters

    engine = build(setup, lr=0.5)
    for window in range(3):
        run_rows(engine, window, BEFORE)
        if window == 1:
            engine.save_checkpoint(folder)
        run_rows(engine, window, AFTER)
        step(engine, how)
    found = masters(engine)
    engine.destroy()
    return found


def go_on(setup: Setup, how: str, folder: str, discard: bool = False) -> tuple[list[torch.Tensor], list[str], Any]:
    """Resume; the master weights, warnings, and what the window holds after the load."""
    from support.engines import build, masters

    engine = build(setup, lr=0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.load_checkpoint(folder, discard_window=discard)
    window = engine.update_window
    held = window.micro_batches, window.requests, window.weights.on_host
    for number in (1, 2):
        if discard and number == 1:
            run_rows(engine, number, BEFORE)
        run_rows(engine, number, BEFORE if number == 2 else AFTER)
        if number == 2:
            run_rows(engine, number, AFTER)
        step(engine, how)
    found = masters(engine)
    engine.destroy()
    return found, [str(each.message) for each in caught], held


@pytest.mark.parametrize(
    ("ranks", "before", "after", "how"),
    [
        ((2, 1), ON_DEVICE, ON_DEVICE, "token"),
        ((1, 2), OFFLOADED, OFFLOADED, "divisor"),
        ((4, 2), replace(OFFLOADED, retain=True), replace(OFFLOADED, stage=1, offload=False), "token"),
        ((2, 3), replace(ON_DEVICE, stage=1), replace(ON_DEVICE, offload=True), "token"),
        ((2, 1), SHARDED, SHARDED, "token"),
    ],
    ids=["2-1", "1-2", "4-2", "2-3", "2-1, stage 3"],
)
def test_the_window_goes_on(
    group_of: Callable[[int], RankGroup],
    ranks: tuple[int, int],
    before: Setup,
    after: Setup,
    how: str,
    tmp_path: Path,
) -> None:
    folder, (old, new) = str(tmp_path / "saved"), ranks
    whole = group_of(old).run(begin, before, how, folder)[0]
    if before.stage == 3:
        assert group_of(1).run(command, "convert", folder, f"{folder}.new")[0][0] == 0
        folder = f"{folder}.new"
    results = group_of(new).run(go_on, after, how, folder)
    for found, messages, held in results:
        if ranks == (2, 3):
            assert any("multiplied by 2/3, which rounds" in text for text in messages)
            assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-3) for a, b in zip(found, whole, strict=True))
        else:
            assert not any("which rounds" in text for text in messages)
            assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
        assert held[:2] == (ROWS // new, ROWS // old)
    assert sum(held[2] for _, _, held in results) == ROWS


def test_a_mean_over_one_ranks_micro_batches_is_refused(
    two_ranks: RankGroup, one_rank: RankGroup, tmp_path: Path
) -> None:
    two_ranks.run(begin, ON_DEVICE, "token", str(tmp_path))
    message = "^ValueError: normalization='mean' divides by the micro-batches of one rank, and another number of ranks"
    assert_fails(one_rank, message, go_on, ON_DEVICE, "mean", str(tmp_path))
    (found, _, held), *_ = one_rank.run(go_on, ON_DEVICE, "mean", str(tmp_path), discard=True)
    assert held == (0, 0, 0.0)
    assert found[0].abs().sum() > 0
