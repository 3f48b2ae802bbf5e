"""AdamW and its warm-up by the section ``optimizer``; the same in both recipes."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from requestzero.environment.cpu_adam import compile_cpu_adam
from requestzero.recipes.config_schema import OptimizerConfig
from requestzero.recipes.errors import UsageError


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build AdamW over all parameters, PyTorch's or DeepSpeed's for the CPU."""
    if config.name == "cpu_adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, adamw_mode=True)
    return torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)


def compile_ahead(config: OptimizerConfig) -> None:
    """Compile DeepSpeed's CPU Adam where it is asked for: before the ranks are started, or before each builds its own.

    Raises:
        UsageError: it cannot be compiled.
    """
    if config.name != "cpu_adam":
        return
    try:
        compile_cpu_adam()
    except RuntimeError as error:
        raise UsageError([f"optimizer.name='cpu_adam': {error}"]) from None


def make_warmup(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> LambdaLR:
    """Build a linear rise of the learning rate; one step of the scheduler is one applied update."""
    rise = config.warmup_steps + 1
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / rise))
