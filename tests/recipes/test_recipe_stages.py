"""The recipe at stage 3: its losses are those of stage 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from requestzero.recipes import lightning_run
from support.ranks import RankGroup
from support.recipe_configs import TINY, compose_recipe


def train(folder: str, *overrides: str) -> Any:
    """Run the Lightning recipe on this rank; its summary on the first one."""
    limits = ["model.layers=1", "data.requests_per_update=2", "trainer.max_steps=3", "trainer.gradient_clip_val=0.5"]
    cfg = compose_recipe(*TINY, *limits, "trainer.devices=2", "trainer.accelerator=cpu", "precision=fp32", *overrides)
    return lightning_run.train(cfg, Path(folder), Console(quiet=True))


@pytest.mark.parametrize("offload", ["", "_offload"])
def test_losses_are_those_of_stage_2(two_ranks: RankGroup, offload: str, tmp_path: Path) -> None:
    lines = [json.dumps({"id": n, "texts": [f"request {n}, text {item}" for item in range(n + 1)]}) for n in range(5)]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines))
    data = ["data=jsonl", f"data.path='{tmp_path}/requests.jsonl'"]
    stage_2, stage_3 = (
        two_ranks.run(train, str(tmp_path / f"{stage}"), f"zero=stage{stage}{offload}", *data)[0] for stage in (2, 3)
    )
    assert (stage_3.updates_applied, stage_3.requests) == (stage_2.updates_applied, stage_2.requests) == (3, 5)
    assert stage_3.first_loss == stage_2.first_loss > stage_3.last_loss
    # DeepSpeed's stage 3 has a linear function of its own, whose gradients are rounded otherwise.
    assert stage_3.last_loss == pytest.approx(stage_2.last_loss, rel=1e-6)
