"""A run goes on with another number of ranks: from the checkpoint as it is, and by universal checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support.accelerate_loops import Loop, data, make_accelerator, make_optimizer, weights
from support.accelerate_state import fresh
from support.checkpoint_tool import command, inspected
from support.models import RowWeight
from support.ranks import RankGroup
from support.scripts import finish, start_module
from support.setup import KEEP_OPTIMIZER


def go_on(plugin: dict[str, Any], load: str | None, save: str | None, updates: range) -> list[list[float]]:
    """Weights after every update; all ranks have the same data."""
    with fresh():
        loop = Loop(plugin=plugin, optimizer="adamw", lr=0.1)
        accelerator = make_accelerator(loop)
        model: Any = RowWeight()
        model, optimizer = accelerator.prepare(model, make_optimizer(loop, model))
        if load is not None:
            accelerator.load_state(load)
        found = [weights(accelerator, model)]
        for row in data(8, 1)[updates.start : updates.stop]:
            accelerator.backward(model(row[None].to(accelerator.device)))
            optimizer.step()
            optimizer.zero_grad()
            found.append(weights(accelerator, model))
        if save is not None:
            accelerator.save_state(save)
        accelerator.free_memory()
        return found


@pytest.mark.parametrize("offload", [False, True])
def test_two_ranks_and_then_one(two_ranks: RankGroup, one_rank: RankGroup, tmp_path: Path, offload: bool) -> None:
    device = "cpu" if offload else "none"
    plugin: dict[str, Any] = {"offload_optimizer_device": device, "hf_ds_config": KEEP_OPTIMIZER}
    saved, universal = str(tmp_path / "saved"), str(tmp_path / "universal")
    whole = two_ranks.run(go_on, plugin, None, None, range(6))[0]
    two_ranks.run(go_on, plugin, None, saved, range(4))
    shutil.copytree(saved, universal, ignore=shutil.ignore_patterns("pytorch_model"))
    folders = ("--input_folder", f"{saved}/pytorch_model", "--output_folder", f"{universal}/pytorch_model")
    finish(
        start_module("deepspeed.checkpoint.ds_to_universal", *folders, "--inject_missing_state", DS_ACCELERATOR="cpu")
    )
    loading = {**plugin, "hf_ds_config": {**KEEP_OPTIMIZER, "checkpoint": {"load_universal": True}}}
    assert one_rank.run(inspected, saved) == [("Accelerate", 2, 2, 4, True)]
    for options, folder in ((loading, universal), (plugin, saved)):
        for found in one_rank.run(go_on, options, folder, None, range(4, 6)):
            assert found == [pytest.approx(expected, rel=1e-6) for expected in whole[4:]]
    assert torch.tensor(whole).diff(dim=0).abs().max() > 0
    assert os.path.isdir(f"{universal}/pytorch_model/zero")


@pytest.mark.parametrize("offload", [False, True])
def test_stage_3_goes_on_from_a_converted_state(
    two_ranks: RankGroup, one_rank: RankGroup, tmp_path: Path, offload: bool
) -> None:
    device = "cpu" if offload else "none"
    plugin = {"zero_stage": 3, "offload_optimizer_device": device, "hf_ds_config": KEEP_OPTIMIZER}
    saved, converted = str(tmp_path / "saved"), str(tmp_path / "converted")
    whole = two_ranks.run(go_on, plugin, None, None, range(6))[0]
    two_ranks.run(go_on, plugin, None, saved, range(4))
    assert one_rank.run(command, "convert", saved, converted)[0][0] == 0
    assert one_rank.run(inspected, converted) == [("Accelerate", 3, 2, 4, True)]
    for found in one_rank.run(go_on, plugin, converted, None, range(4, 6)):
        assert found == whole[4:]
