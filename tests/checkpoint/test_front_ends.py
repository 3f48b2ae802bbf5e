"""Lightning goes on with another number of ranks: as it is at stages 1 and 2, converted at stage 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from requestzero.lightning import RequestZeRO
from support.checkpoint_tool import command, inspected
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER


class Regression(LightningModule):
    """All ranks get the same batches, so that their mean is the same whatever their number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = torch.nn.Linear(5, 3)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def on_fit_end(self) -> None:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.parameters())):
            self.found = [parameter.detach().cpu().clone() for parameter in self.parameters()]


def fit(root: str, epochs: int, options: dict[str, Any], load: str | None = None, save: str | None = None) -> Any:
    """Train to an epoch's end; weights, learning rate and counts."""
    batches = [torch.full((2, 5), 0.25 * (number + 1)) for number in range(4)]
    strategy = RequestZeRO(**options, config=KEEP_OPTIMIZER)
    trainer = Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=root,
    )
    module = Regression()
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=load)  # type: ignore[arg-type]
    if save is not None:
        trainer.save_checkpoint(save)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return module.found, rate, strategy.applied_updates, trainer.global_step


def weights_of(path: str, file: str) -> list[torch.Tensor]:
    """Make one file of a checkpoint; what a module gets of it."""
    from safetensors.torch import load_file

    assert command("weights", path, file)[0] == 0
    module = Regression()
    if file.endswith(".ckpt"):
        module = Regression.load_from_checkpoint(file, map_location="cpu", weights_only=False)
    else:
        module.load_state_dict(load_file(file))
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 2, "offload_optimizer": True}, {"stage": 3}])
def test_fit_from_the_checkpoint_of_two_ranks(
    two_ranks: RankGroup, one_rank: RankGroup, options: dict[str, Any], tmp_path: Path
) -> None:
    root, saved, converted = str(tmp_path), str(tmp_path / "saved.ckpt"), str(tmp_path / "converted.ckpt")
    (weights, *counts), _ = two_ranks.run(fit, root, 2, options)
    between = two_ranks.run(fit, root, 1, options, save=saved)[0][0]
    assert one_rank.run(inspected, saved) == [("Lightning", options["stage"], 2, 2, True)]
    for name in ("weights.ckpt", "weights.safetensors"):
        for value, expected in zip(one_rank.run(weights_of, saved, str(tmp_path / name))[0], between, strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=0)
    if options["stage"] == 3:
        assert one_rank.run(command, "convert", saved, converted)[0][0] == 0
        saved = converted
    ((found, *found_counts),) = one_rank.run(fit, root, 2, options, load=saved)
    assert found_counts == counts
    assert counts[1:] == [4, 4]
    for value, expected in zip(found, weights, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=0)
