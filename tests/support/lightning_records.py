"""Records of a small training run: hooks, updates, log entries, and this rank's state at its end."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from requestzero.lightning import RequestZeRO
from support.engines import flat_masters
from support.lightning_model import Model

HOOKS = (
    "on_train_batch_start",
    "optimizer_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_validation_model_zero_grad",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_start",
    "on_train_end",
)


def recording(model: Model) -> list[str]:
    """Let the model's hooks note their names, beside doing what they do."""
    calls: list[str] = []

    def wrap(name: str) -> Any:
        original = getattr(model, name)

        def hook(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return hook

    for name in HOOKS:
        # An instance attribute: what Lightning calls, without being an override in a class that it would warn of.
        object.__setattr__(model, name, wrap(name))
    return calls


class Updates(Callback):
    """Weights, learning rate and gradient norm after every update, and what the counters say."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.norm: float | None = None
        self.steps = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.steps = trainer.global_step

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        if isinstance(trainer.strategy, DDPStrategy) and not isinstance(trainer.strategy, DeepSpeedStrategy):
            grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            self.norm = float(torch.cat([grad.flatten() for grad in grads]).norm())

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.global_step == self.steps:
            return
        self.steps = trainer.global_step
        strategy = trainer.strategy
        if isinstance(strategy, RequestZeRO):
            self.norm = strategy.grad_norm
        self.rows.append(
            {
                "step": trainer.global_step,
                "batch": args[2],
                "weights": weights(module),
                "lr": trainer.optimizers[0].param_groups[0]["lr"],
                "norm": self.norm,
                "applied": getattr(strategy, "applied_updates", None),
                "skipped": getattr(strategy, "skipped_updates", None),
            }
        )


class ListLogger(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "list"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, {k: float(v) for k, v in metrics.items() if k != "epoch"}))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def weights(module: LightningModule) -> list[float]:
    """All weights, in fp32 (collective at stage 3, where a rank has a part of each)."""
    import deepspeed

    parameters = list(module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id")):
        return torch.cat([parameter.detach().float().flatten() for parameter in parameters]).tolist()


def optimizer_state(trainer: Trainer) -> dict[str, Any]:
    """This rank's master weights and optimizer state."""
    if not isinstance(trainer.strategy, RequestZeRO):
        return {}
    parts = flat_masters(trainer.strategy.engine)
    state: dict[str, Any] = {"masters": [part.tolist() for part in parts]}
    for index, part in enumerate(parts):
        for key, value in trainer.strategy.engine.optimizer.state[part].items():
            state[f"{index}.{key}"] = value.tolist() if isinstance(value, torch.Tensor) else value
    return state
