"""Faults of Lightning's ``DeepSpeedStrategy``, each with the smallest training that shows it. requestzero is not used.

    DS_ACCELERATOR=cpu python tests/upstream_faults/lightning_faults.py [NAME ...]

One rank, a weight of one element that begins at 0, losses that are the weight times a number, SGD with a learning rate
of 1: an update is the mean of the window's numbers. Lightning's strategy refuses the CPU, so that two of its checks are
left out there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy

CONFIG = {
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": 1,
}


class OneWeight(pl.LightningModule):
    """A loss whose gradient is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.rates: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.weight * batch).sum()

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5**update)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OnTheCpu(DeepSpeedStrategy):
    """Lightning's strategy without its check for CUDA, and with a rank for the device."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        pl.strategies.DDPStrategy.setup_environment(self)

    def _init_deepspeed_distributed(self) -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; compiles for a minute
        super()._init_deepspeed_distributed()


def train(strategy: Any, numbers: list[float], module: OneWeight | None = None, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    loader = torch.utils.data.DataLoader(torch.tensor(numbers), batch_size=1)
    checks_gpus = "lightning.pytorch.strategies.deepspeed._validate_device_index_selection"
    with patch(checks_gpus, lambda devices: None), patch.dict(os.environ):  # WORLD_SIZE and its like are left behind
        trainer.fit(module or OneWeight(), loader)
    return trainer


def deepspeed_strategy(**config: Any) -> OnTheCpu:
    return OnTheCpu(config={**CONFIG, **config})


Result = tuple[Any, Any]
"""What is right, and what was measured."""


def the_loss_is_divided_twice() -> Result:
    """``accumulate_grad_batches=4``: Lightning divides the loss by 4, and DeepSpeed's backward once more."""
    trainer = train(deepspeed_strategy(), [1.0] * 4, accumulate_grad_batches=4, max_epochs=1)
    return "a weight of -1.0, as with DDP,", float(trainer.lightning_module.weight.detach()[0])


def updates_are_not_those_that_are_counted() -> Result:
    """5 batches an epoch, 2 of them an update, 3 epochs: what is left of an epoch goes into the next."""
    trainer = train(deepspeed_strategy(), [1.0] * 5, accumulate_grad_batches=2, max_epochs=3)
    return f"{trainer.global_step} as the Trainer says", trainer.strategy.model.global_steps  # type: ignore[union-attr]


def the_schedule_moves_on_a_skipped_step() -> Result:
    """bf16, the first update is NaN and skipped by DeepSpeed; the learning rate is halved all the same."""
    strategy = deepspeed_strategy(bf16={"enabled": True})
    trainer = train(strategy, [float("nan"), 1.0], max_epochs=1, precision="bf16-true")
    return [1.0, 0.5], trainer.lightning_module.rates


def arguments_beside_a_config_are_ignored() -> Result:
    """``DeepSpeedStrategy(config=..., stage=3)``."""
    strategy = DeepSpeedStrategy(config=dict(CONFIG), stage=3)
    return "3, or an error", strategy.config["zero_optimization"]["stage"]  # type: ignore[index]


def unmanaged_accumulation_steps_in_every_batch() -> Result:
    """``managed_gradient_accumulation: false`` and ``accumulate_grad_batches=2``: 4 batches, 2 updates."""
    strategy = deepspeed_strategy(managed_gradient_accumulation=False)
    trainer = train(strategy, [1.0] * 4, accumulate_grad_batches=2, max_epochs=1)
    return 2, trainer.strategy.model.global_steps  # type: ignore[union-attr]


class Requests(OneWeight):
    """Two batches are a request, which the engine is told."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.trainer.strategy.model.set_gradient_accumulation_boundary(batch_idx % 2 == 1)  # type: ignore[union-attr, operator]
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def gradients_are_cleared_before_every_batch() -> Result:
    """Stages 1 and 2, the engine is told that two batches are a request: gradients 1 and 3."""
    found = []
    for stage in (1, 2):
        trainer = train(deepspeed_strategy(zero_optimization={"stage": stage}), [1.0, 3.0], Requests(), max_epochs=1)
        found.append(float(trainer.lightning_module.weight.detach()[0]))
    return [-4.0, -4.0], found


def the_cpu_is_refused() -> Result:
    """DeepSpeed runs on the CPU, with gloo; its strategy does not."""
    try:
        train(DeepSpeedStrategy(config=dict(CONFIG)), [1.0], max_epochs=1)
    except Exception as error:
        return "an update", f"{type(error).__name__}: {error}"
    return "an update", "an update"


FAULTS: list[Callable[[], Result]] = [
    arguments_beside_a_config_are_ignored,
    the_loss_is_divided_twice,
    updates_are_not_those_that_are_counted,
    the_schedule_moves_on_a_skipped_step,
    unmanaged_accumulation_steps_in_every_batch,
    gradients_are_cleared_before_every_batch,
    the_cpu_is_refused,
]


def main(names: list[str]) -> None:
    for fault in FAULTS:
        if not names or fault.__name__ in names:
            wanted, got = fault()
            print(f"{fault.__name__}: {wanted} is right, {got} with Lightning {pl.__version__}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
