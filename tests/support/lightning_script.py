"""A user's script for Lightning: a module, a loader, a Trainer. Run by ``lightning/test_script.py``."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from requestzero import RequestLoader, RequestZeRO


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.weight * batch).sum()

    def on_train_batch_end(self, *args: Any) -> None:
        strategy = self.trainer.strategy
        if strategy.update_applied:
            self.log("grad_norm", strategy.grad_norm)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def main(strategy: str, devices: str, directory: str) -> None:
    requests = [[torch.full((3,), float(number))] * items for number, items in ((1, 2), (2, 6), (3, 4), (4, 2))]
    loader = RequestLoader(requests, torch.stack, shuffle=False, filler=torch.zeros_like)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(devices),
        strategy=RequestZeRO() if strategy == "object" else strategy,
        accumulate_grad_batches=2,
        max_epochs=1,
        log_every_n_steps=1,
        logger=CSVLogger(directory),
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    model = Line()
    trainer.fit(model, loader)
    with open(os.path.join(directory, f"rank{trainer.global_rank}.txt"), "w") as file:
        file.write(f"{trainer.world_size} {trainer.global_step} {model.weight.tolist()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
