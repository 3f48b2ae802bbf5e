"""``python -m requestzero.checkpoint``: what it says, converts and writes, for the engine's own checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoint_tool import command
from support.ranks import RankGroup
from support.setup import Setup
from support.shared_data import run_rows

UPDATES = 2


def trained(setup: Setup, first: int = 0, load: str | None = None, save: str | None = None) -> list[torch.Tensor]:
    """Train from one update on, or from a checkpoint; the whole master weights."""
    from support.engines import build, masters

    engine = build(setup, lr=0.5)
    if load is not None:
        engine.load_checkpoint(load)
        assert engine.applied_updates == first
    for update in range(first, first + UPDATES):
        run_rows(engine, update)
        engine.step(normalization="token")
        if update == UPDATES - 1 and save is not None:
            engine.save_checkpoint(save)
    found = masters(engine)
    engine.destroy()
    return found


def uninterrupted(setup: Setup) -> list[torch.Tensor]:
    from support.engines import build, masters

    engine = build(setup, lr=0.5)
    for update in range(2 * UPDATES):
        run_rows(engine, update)
        engine.step(normalization="token")
    found = masters(engine)
    engine.destroy()
    return found


@pytest.fixture(scope="module", params=[2, 3])
def saved(request: pytest.FixtureRequest, two_ranks: RankGroup, tmp_path_factory: Any) -> Any:
    """A checkpoint of two ranks after two updates, its weights, and those of a run that went on."""
    setup = Setup(stage=request.param, model="bf16", optimizer="adamw")
    folder = tmp_path_factory.mktemp("saved")
    weights = two_ranks.run(trained, setup, save=str(folder))[0]
    return setup, folder, weights, two_ranks.run(uninterrupted, setup)[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_converted_checkpoint_is_loaded_by_any_number_of_ranks(
    saved: Any, ranks: int, one_rank: RankGroup, group_of: Callable[[int], RankGroup], tmp_path: Path
) -> None:
    setup, folder, _, expected = saved
    converted = tmp_path / "converted"
    (folder / "of a front end").write_text("kept")
    status, out, error = one_rank.run(command, "convert", str(folder), str(converted))[0]
    assert status == 0, error
    assert out == f"{converted} can be loaded by any number of ranks.\n"
    assert (converted / "of a front end").read_text() == "kept"
    for found in group_of(ranks).run(trained, setup, UPDATES, load=str(converted)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    again = one_rank.run(command, "convert", str(converted), str(tmp_path / "again"))[0]
    assert again[0] == 1
    assert "is in the universal format already" in again[2]
    contents = json.loads(one_rank.run(command, "inspect", str(converted), "--json")[0][1])
    assert contents["format"] == "universal"
    assert contents["stage"] == setup.stage
    assert contents["whole"]
    status, _, error = one_rank.run(command, "weights", str(converted), str(tmp_path / "weights.pt"))[0]
    assert (status, "give the checkpoint that it was made of" in error) == (1, True)


def assert_weights(one_rank: RankGroup, folder: Path, weights: list[torch.Tensor], tmp_path: Path) -> None:
    """Compare the files that the command makes of a checkpoint with its master weights."""
    from safetensors.torch import load_file

    for name in ("weights.safetensors", "weights.pt"):
        file = tmp_path / name
        assert one_rank.run(command, "weights", str(folder), str(file))[0][0] == 0
        found = load_file(file) if file.suffix == ".safetensors" else torch.load(file)
        assert [found[f"layers.{i}.weight"].dtype for i in range(len(weights))] == [torch.float32] * len(weights)
        assert all(torch.equal(found[f"layers.{i}.weight"], weight) for i, weight in enumerate(weights))


def test_what_a_checkpoint_holds(saved: Any, one_rank: RankGroup, tmp_path: Path) -> None:
    setup, folder, weights, _ = saved
    status, out, error = one_rank.run(command, "inspect", str(folder), "--json", "--checksums")[0]
    assert status == 0, error
    found = json.loads(out)
    assert found["problems"] == []
    assert found["window"] is None
    assert found["versions"]["DeepSpeed"]
    wanted = {
        "folder": str(folder / "global_step2"),
        "written_by": "engine",
        "format": "of each rank",
        "stage": setup.stage,
        "ranks": 2,
        "parameters": sum(weight.numel() for weight in weights),
        "applied_updates": 2,
        "skipped_updates": 0,
        "whole": True,
    }
    assert {key: found[key] for key in wanted} == wanted
    text = one_rank.run(command, "inspect", str(folder / "global_step2"))[0][1]
    assert f"stage {setup.stage}, 2 data-parallel ranks" in text
    assert_weights(one_rank, folder, weights, tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("damage", ["cut", "bit", "missing"])
def test_what_is_damaged_is_found(saved: Any, damage: str, rank: int, one_rank: RankGroup, tmp_path: Path) -> None:
    folder = shutil.copytree(saved[1], tmp_path / "copy")
    (file,) = folder.glob(f"*/bf16_zero_pp_rank_{rank}_*optim_states.pt")
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "bit":
        place = content.index(b"exp_avg")
        file.write_bytes(content[:place] + b"exp_bvg" + content[place + 7 :])
    else:
        file.unlink()
    status, out, _ = one_rank.run(command, "inspect", str(folder), "--checksums")[0]
    assert status == 3
    assert "whole       NO" in out
    assert ("of 1 ranks" if damage == "missing" else file.name) in out


def test_stage_3_names_the_command(saved: Any, one_rank: RankGroup) -> None:
    from support.failures import assert_fails

    setup, folder, *_ = saved
    if setup.stage == 3:
        message = r"was saved by 2 ranks and this run has 1.*python -m requestzero\.checkpoint convert .*global_step2 "
        assert_fails(one_rank, message, trained, setup, UPDATES, load=str(folder))


def test_what_cannot_be_converted(two_ranks: RankGroup, one_rank: RankGroup, saved: Any, tmp_path: Path) -> None:
    folder = saved[1]
    assert "exists: name a new folder" in one_rank.run(command, "convert", str(folder), str(tmp_path))[0][2]
    status, _, error = one_rank.run(command, "convert", str(folder), str(folder / "converted"))[0]
    assert (status, "which is copied there: name a folder outside of it" in error) == (1, True)
    assert not (folder / "converted.unfinished").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is no checkpoint of DeepSpeed" in one_rank.run(command, "inspect", str(empty))[0][2]
    two_ranks.run(trained, Setup(stage=2), save=str(tmp_path / "sgd"))
    status, _, error = one_rank.run(command, "convert", str(tmp_path / "sgd"), str(tmp_path / "new"))[0]
    assert status == 1
    assert "states of Adam's kind" in error
    assert not (tmp_path / "new").exists()
