"""The training task as Lightning sees it: a loss per micro-batch and an optimizer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from requestzero.environment.fp32_matmuls import run_in_fp32
from requestzero.recipes.config_schema import OptimizerConfig
from requestzero.recipes.model import micro_batch_loss, next_token_loss
from requestzero.recipes.optimizer import make_optimizer, make_warmup


class LanguageModeling(LightningModule):
    """Next-token prediction. It knows nothing of requests but the normalization of their micro-batches' losses.

    Args:
        model: called as Hugging Face's causal LMs are.
        optimizer: the section ``optimizer``.
        normalization: of the update window, see :mod:`requestzero.config.options`.
        fp32_matmuls: compute the matrix products in fp32; what the first rank has is done on all.
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerConfig, normalization: str, fp32_matmuls: bool) -> None:
        super().__init__()
        self.model = model
        self.optimizer_config = optimizer
        self.normalization = normalization
        self.fp32_matmuls = fp32_matmuls

    def setup(self, stage: str) -> None:
        """Agree with the other ranks, which have not measured their processors (collective)."""
        if self.trainer.strategy.broadcast(self.fp32_matmuls):
            run_in_fp32(self.model)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return ``loss`` for the backward, the sum of the losses (nats) of its trained tokens, and their number."""
        total, tokens = next_token_loss(self.model, batch)
        loss = micro_batch_loss(total, tokens, self.normalization)
        return {"loss": loss, "loss_sum": total.detach(), "tokens": tokens}

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model, self.optimizer_config)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": make_warmup(optimizer, self.optimizer_config), "interval": "step"},
        }
