"""Models of the small training runs, with every way to optimize by hand."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule

from requestzero import AbortRequest
from support.lightning_data import batch_weight, rank
from support.lightning_spec import Run

START = [0.0, 1.0, 2.0, -2.0, -1.0, 0.0, 1.0, 2.0]
LR, MOMENTUM = 0.5, 0.5


class Model(LightningModule):
    """Two parameters, one of which lies on both ranks; the gradient of the loss is the batch."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run_spec = run
        self.first = torch.nn.Parameter(torch.arange(3.0))
        self.second = torch.nn.Parameter(torch.arange(5.0) - 2)
        self.automatic_optimization = run.manual is None
        self.seen: list[tuple[str, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first * x[:3]).sum() + (self.second * x[3:]).sum()

    def loss(self, batch: Any) -> torch.Tensor:
        return self(batch["x"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert isinstance(batch, dict)
        self.seen.append(("train", int(batch["index"])))
        aborts = self.aborts(int(batch["index"]))
        if aborts and self.run_spec.aborts_by == "return":
            return AbortRequest("returned")
        if aborts and self.run_spec.aborts_by == "raise":
            raise AbortRequest("raised")
        loss = self.loss(batch)
        for _ in range(self.run_spec.adds_weight):
            weight = batch_weight(int(batch["index"]), rank(), self.run_spec.empty_batches)
            self.trainer.strategy.add_weight(torch.tensor(weight))
        self.log("loss", loss.detach())
        if self.run_spec.manual is None:
            return loss
        getattr(self, f"manual_{self.run_spec.manual}")(batch, batch_idx, loss)
        if aborts:
            raise AbortRequest("late")
        return None

    def aborts(self, index: int) -> bool:
        return index in self.run_spec.aborted_batches and self.run_spec.aborting_rank in (None, rank())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert isinstance(batch, dict)
        self.seen.append(("validate", int(batch["index"])))
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer
        if self.run_spec.optimizer == "sgd":
            optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=2e-2)
        if not self.run_spec.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5 ** (update // 2))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # Ways of manual optimization.

    def manual_every_third(self, batch: Any, batch_idx: int, loss: torch.Tensor) -> None:
        optimizer = self.optimizers()
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    def manual_twice_each(self, batch: Any, batch_idx: int, loss: torch.Tensor) -> None:
        self.manual_backward(loss)
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            self.optimizers().step()

    def manual_discard(self, batch: Any, batch_idx: int, loss: torch.Tensor) -> None:
        if batch_idx % 3 == 1:
            self.optimizers().zero_grad()
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            self.optimizers().step()

    def manual_marked(self, batch: Any, batch_idx: int, loss: torch.Tensor) -> None:
        self.manual_backward(loss)
        if self.trainer.strategy.window_end:
            self.optimizers().step()

    def manual_weighted(self, batch: Any, batch_idx: int, loss: torch.Tensor) -> None:
        self.trainer.strategy.add_weight(self.trainer.strategy.batch_weight)
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            self.optimizers().step()

    def manual_two_requests(self, batch: Any, batch_idx: int, loss: torch.Tensor) -> None:
        self.manual_backward(loss)
        self.trainer.strategy.end_request()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            self.run_spec.requests_at_step.append(self.trainer.strategy.engine.update_window.requests)
            self.optimizers().step()


class CurvedModel(Model):
    """A loss whose gradient depends on the weights, and on random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(torch.nn.functional.dropout(x, self.dropout)) - 1) ** 2 / 16

    @property
    def dropout(self) -> float:
        return self.run_spec.dropout if self.training else 0.0
