"""The recipe at stage 3: its losses and weights are those of stage 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console

from requestzero.recipes import lightning_run
from requestzero.recipes.lightning_module import LanguageModeling
from support.ranks import RankGroup
from support.recipe_configs import TINY, compose_recipe

CLIPPED = "trainer.gradient_clip_val=0.5"


def train(folder: str, *overrides: str) -> Any:
    """Run the Lightning recipe on this rank; its summary on the first one."""
    limits = ["model.layers=1", "data.requests_per_update=2", "trainer.max_steps=3"]
    cfg = compose_recipe(*TINY, *limits, "trainer.devices=2", "trainer.accelerator=cpu", "precision=fp32", *overrides)
    return lightning_run.train(cfg, Path(folder), Console(quiet=True))


def data_in(folder: Path) -> list[str]:
    lines = [json.dumps({"id": n, "texts": [f"request {n}, text {item}" for item in range(n + 1)]}) for n in range(5)]
    (folder / "requests.jsonl").write_text("\n".join(lines))
    return ["data=jsonl", f"data.path='{folder}/requests.jsonl'"]


@pytest.mark.parametrize("offload", ["", "_offload"])
def test_losses_are_those_of_stage_2(two_ranks: RankGroup, offload: str, tmp_path: Path) -> None:
    data = [*data_in(tmp_path), CLIPPED]
    stage_2, stage_3 = (
        two_ranks.run(train, str(tmp_path / f"{stage}"), f"zero=stage{stage}{offload}", *data)[0] for stage in (2, 3)
    )
    assert (stage_3.updates_applied, stage_3.requests) == (stage_2.updates_applied, stage_2.requests) == (3, 5)
    assert stage_3.first_loss == stage_2.first_loss > stage_3.last_loss
    # DeepSpeed's stage 3 has a linear function of its own, whose gradients are rounded otherwise.
    assert stage_3.last_loss == pytest.approx(stage_2.last_loss, rel=1e-6)


def trained(folder: str, zero: dict[str, Any], *overrides: str) -> dict[str, torch.Tensor]:
    """Run the recipe with more of the section ``zero_optimization``; the whole weights at its end."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    found = {}

    def keep(module: torch.nn.Module) -> None:
        with GatheredParameters(list(module.parameters())):
            found.update({name: param.detach().clone() for name, param in module.named_parameters()})

    config = {**lightning_run.DEEPSPEED_CONFIG, "zero_optimization": zero}
    with (
        patch.object(lightning_run, "DEEPSPEED_CONFIG", config),
        patch.object(LanguageModeling, "on_fit_end", keep),
    ):
        train(folder, *overrides)
    return found


@pytest.mark.parametrize("offload", ["", "_offload"])
def test_weights_are_those_of_stage_2_bit_for_bit(two_ranks: RankGroup, offload: str, tmp_path: Path) -> None:
    """With PyTorch's own linear layers, and without clipping: the norm is summed up in another order."""
    data, own = [*data_in(tmp_path), "trainer.gradient_clip_val=null"], {"memory_efficient_linear": False}
    of_stage_2 = two_ranks.run(trained, str(tmp_path / "2"), {}, f"zero=stage2{offload}", *data)
    of_stage_3 = two_ranks.run(trained, str(tmp_path / "3"), own, f"zero=stage3{offload}", *data)
    for wanted, got in zip(of_stage_2, of_stage_3, strict=True):
        assert len(wanted) > 10
        assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []
