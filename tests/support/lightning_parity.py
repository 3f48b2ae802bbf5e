"""Programs for Lightning that are run with ``strategy="ddp"`` and with ours, and have to come to the same.

A program is a module-level function of a kind of strategy, run on every rank; it returns numbers, such as weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from requestzero.lightning import RequestZeRO
from support.lightning_data import rank
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER

OURS: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "stage2 offload": {"stage": 2, "offload_optimizer": True, "config": KEEP_OPTIMIZER},
}
BATCHES = 12

Program = Callable[[str], Any]


class Net(pl.LightningModule):
    """A small network whose gradients depend on its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self(x) - x.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


class ManualNet(Net):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def data(batches: int = BATCHES) -> DataLoader[Any]:
    """Return batches of two rows, different on every rank."""
    rows = torch.randn(2 * batches, 4, generator=torch.Generator().manual_seed(3 + rank()))
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def trainer_of(kind: str, **options: Any) -> pl.Trainer:
    """Return a Trainer with ``"ddp"``, or one of ``OURS``."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": torch.distributed.get_world_size(),
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": any("Checkpoint" in type(each).__name__ for each in options.get("callbacks", ())),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": tempfile.gettempdir(),
    }
    settings["strategy"] = kind if kind == "ddp" else RequestZeRO(**OURS[kind])
    return pl.Trainer(**{**settings, **options})


def weights(module: torch.nn.Module) -> list[float]:
    """Return all weights of a module."""
    return torch.cat([parameter.detach().float().flatten() for parameter in module.parameters()]).tolist()


def fitted(kind: str, module: pl.LightningModule, **options: Any) -> list[float]:
    """Return the weights of a module after a fit."""
    trainer_of(kind, **options).fit(module, data())
    return weights(module)


def assert_as_under_ddp(ranks: RankGroup, program: Program, kinds: Sequence[str] = tuple(OURS)) -> None:
    """All ranks come to the numbers that they come to under DDP, within the rounding of fp32."""
    reference = ranks.run(program, "ddp")
    for kind in kinds:
        for want, got in zip(reference, ranks.run(program, kind), strict=True):
            assert got == pytest.approx(want, rel=2e-5, abs=2e-5), kind
