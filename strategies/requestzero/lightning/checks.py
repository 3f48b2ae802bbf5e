"""Checks that need the Trainer, the model or its loader.

Written for Lightning 2.6.6.
"""

from __future__ import annotations

from collections.abc import Iterable

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import LBFGS, Optimizer

from requestzero.config.nested import Config
from requestzero.config.precision import PRECISIONS
from requestzero.lightning.deepspeed_device import supports_fp16


def check_device(device: torch.device, owner: str = "Trainer") -> None:
    """Raise ValueError unless the device of ``owner`` is one that its strategy runs on."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"requestzero runs on CUDA and CPU, but the {owner}'s device is {device.type!r}: use "
            f'{owner}(accelerator="cuda") or {owner}(accelerator="cpu").'
        )


def check_plugin(plugin: Precision) -> DeepSpeedPrecision:
    """Return the Trainer's precision plugin; raise ValueError if it is another strategy's."""
    if not isinstance(plugin, DeepSpeedPrecision):
        raise ValueError(
            f"{type(plugin).__name__} cannot be the precision plugin of RequestZeRO: leave it out and set "
            f"Trainer(precision=...) to one of {', '.join(map(repr, PRECISIONS))}."
        )
    return plugin


def check_precision(precision: str, device: torch.device, owner: str = "Trainer") -> None:
    """Raise ValueError where DeepSpeed does not compute in this precision."""
    if PRECISIONS[precision] == "fp16" and not supports_fp16(device):
        raise ValueError(
            f"{owner}(precision={precision!r}) is not possible on {device.type}, where DeepSpeed refuses "
            "fp16: use 'bf16-true', 'bf16-mixed' or '32-true'."
        )


def check_clipping(trainer: pl.Trainer) -> None:
    """Raise ValueError for a way of clipping that DeepSpeed does not have."""
    if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        raise ValueError(
            "Trainer(gradient_clip_algorithm='value') is not possible with DeepSpeed, which clips by norm: "
            "leave it out."
        )


def check_training_step(module: pl.LightningModule) -> None:
    """Raise ValueError for a ``training_step`` whose batches the loop does not see."""
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "training_step(dataloader_iter) takes its batches itself, so nobody could tell where requests "
            "end: write training_step(batch, batch_idx)."
        )


def check_optimizer(optimizer: Optimizer, scheduler: LRSchedulerConfig | None, config: Config) -> None:
    """Raise ValueError for an optimizer that ZeRO cannot run, and for a scheduler beside the config's."""
    if isinstance(optimizer, LBFGS):
        raise ValueError("LBFGS calls its closure several times a step, which ZeRO cannot do: use another optimizer.")
    if scheduler is not None and "scheduler" in config:
        raise ValueError(
            "configure_optimizers returns a learning-rate scheduler and config has one under 'scheduler': keep one."
        )


def explain_several_optimizers(error: Exception) -> None:
    """Raise ValueError with what to do, if this is Lightning's error about several optimizers or schedulers."""
    if "single optimizer" in str(error):
        raise ValueError(
            "configure_optimizers returns several optimizers or learning-rate schedulers, and DeepSpeed has one of "
            "each in an engine: give one optimizer all parameters, in parameter groups, and one scheduler, such as "
            "LambdaLR with a function for each group. With RequestZeROFabric several models have an optimizer each."
        ) from error


def check_config_optimizer(trainer: pl.Trainer) -> None:
    """Raise ValueError for an optimizer of ``configure_optimizers`` that the one in the config would replace.

    Lightning insists on the method; that it returns ``None`` leaves the choice to the config.
    """
    if call._call_lightning_module_hook(trainer, "configure_optimizers") is not None:
        raise ValueError(
            "config has an 'optimizer', and configure_optimizers returns one that would never be used, nor would its "
            "learning-rate scheduler: leave 'optimizer' out of config, or have configure_optimizers return None."
        )


def check_scheduler_frequency(schedulers: Iterable[LRSchedulerConfig]) -> None:
    """Raise ValueError for a frequency that means nothing with batches that are not updates."""
    for config in schedulers:
        if config.interval == "step" and config.frequency != 1:
            raise ValueError(
                f"A learning-rate scheduler has interval='step' and frequency={config.frequency}, which "
                "Lightning counts in batches: with a loader of MicroBatch that says nothing about updates. "
                "Use frequency=1."
            )
