"""A run goes on with another number of ranks: the engine loads the checkpoint of stages 1 and 2 as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.failures import assert_fails
from support.muon import batch, build_muon
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


def stock(setup: Setup, folder: str, save: bool) -> Any:
    """Save with DeepSpeed's own engine, or load that; the whole states."""
    from support.engines import build

    engine = build(setup, not save, lr=0.5)
    if save:
        for update in range(2):
            run_rows_of_stock(engine, update)
        engine.save_checkpoint(folder)
        weights = [param.detach().float().clone() for param in engine.module.parameters()]
    else:
        engine.load_checkpoint(folder)
        weights = [states["master"].view_as(param) for states, param in pairs_of(engine)]
    engine.destroy()
    return weights


def pairs_of(engine: Any) -> Any:
    return zip(whole_states(engine), engine.optimizer.layout.params, strict=True)


def run_rows_of_stock(engine: Any, window: int) -> None:
    from support.windows import ALL, values

    x, w = values(window, 0, 1)
    engine.backward(engine(x, w, ALL))
    engine.step()


def test_a_checkpoint_of_deepspeeds_own_engine(two_ranks: RankGroup, one_rank: RankGroup, tmp_path: Path) -> None:
    saved = two_ranks.run(stock, Setup(), str(tmp_path), True)[0]
    (found,) = one_rank.run(stock, Setup(), str(tmp_path), False)
    assert any(weight.any() for weight in saved)
    assert all(torch.equal(a, b) for a, b in zip(found, saved, strict=True))


def muon(offload: bool, folder: str, load: bool) -> Any:
    engine = build_muon(2, offload, "fp32", "fp32")
    if load:
        engine.load_checkpoint(folder)
    else:
        engine.backward(engine(batch(engine, 0, 0)).sum())
        engine.step()
        engine.save_checkpoint(folder)
    found = whole_states(engine)
    engine.destroy()
    return found


def test_momentum_of_muon(two_ranks: RankGroup, one_rank: RankGroup, tmp_path: Path) -> None:
    saved = two_ranks.run(muon, True, str(tmp_path / "offloaded"), False)[0]
    assert any(states["momentum_buffer"].any() for states in saved if "momentum_buffer" in states)
    assert_equal(one_rank.run(muon, True, str(tmp_path / "offloaded"), True)[0], saved)
    two_ranks.run(muon, False, str(tmp_path / "device"), False)
    assert_fails(
        one_rank, "^ValueError: The momentum of Muon on the device", muon, False, str(tmp_path / "device"), True
    )
