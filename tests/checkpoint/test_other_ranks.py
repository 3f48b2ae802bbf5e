"""A run goes on with another number of ranks: the engine loads the checkpoint of stages 1 and 2 as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.pairwise import pairwise
from support.ranks import RankGroup
from support.setup import Setup
from support.shared_data import run_rows, whole_states

FACTORS: dict[str, Any] = {
    "ranks": [(2, 1), (1, 2), (2, 3), (4, 2)],
    "stages": [(1, 1), (2, 2), (1, 2), (2, 1)],
    "offloads": [(False, False), (True, True), (True, False), (False, True)],
    "optimizer": ["sgd", "adamw"],
    "model": ["fp32", "bf16"],
    "round_robin": [False, True],
}
ROWS = [{factor: FACTORS[factor][index] for factor, index in row.items()} for row in pairwise(FACTORS, "other ranks")]


def run(setup: Setup, updates: range, load: str | None = None, save: str | None = None) -> Any:
    """Train on the same rows whatever the number of ranks; the whole master weights and optimizer state, and counts."""
    from support.engines import build

    engine = build(setup, lr=0.5, **({"momentum": 0.5} if setup.optimizer == "sgd" else {}))
    if load is not None:
        engine.load_checkpoint(load)
        assert engine.applied_updates == updates.start
    for update in updates:
        run_rows(engine, update)
        engine.step(normalization="token")
    if save is not None:
        engine._skips.empty = 3  # as after windows without weight
        engine.save_checkpoint(save, client_state={"mine": 7})
    found = whole_states(engine)
    counts = engine.empty_updates
    engine.destroy()
    return found, counts


def assert_equal(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    """Compare every bit."""
    for a, b in zip(found, expected, strict=True):
        assert set(a) == set(b) > {"master"}
        for key in a:
            assert torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_another_number_of_ranks(group_of: Callable[[int], RankGroup], row: dict[str, Any], tmp_path: Path) -> None:
    before, after = (
        Setup(
            stage=row["stages"][i],
            offload=row["offloads"][i],
            model=row["model"],
            optimizer=row["optimizer"],
            groups=2,
            zero={"round_robin_gradients": row["round_robin"]},
        )
        for i in range(2)
    )
    old, new = (group_of(ranks) for ranks in row["ranks"])
    whole = old.run(run, before, range(4))[0][0]
    old.run(run, before, range(2), save=str(tmp_path))
    for found, empty in new.run(run, after, range(2, 4), load=str(tmp_path)):
        assert_equal(found, whole)
        assert empty == 3
