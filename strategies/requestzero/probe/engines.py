"""Engines of stock DeepSpeed and of requestzero, built alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from requestzero.probe.grid import Configuration, Engine


@contextmanager
def built(configuration: Configuration, engine: Engine, model: torch.nn.Module, lr: float) -> Iterator[Any]:
    """Build DeepSpeed's engine, or requestzero's, around ``model``; destroy it at the end (collective).

    The optimizer is PyTorch's SGD; with 16-bit masters it is DeepSpeed's CPU Adam, which is compiled on first use.
    """
    import deepspeed

    import requestzero

    initialize = requestzero.initialize if engine.requestzero else deepspeed.initialize
    config = configuration.deepspeed_config(engine, sum(p.numel() for p in model.parameters()))
    training = initialize(model=model, optimizer=_optimizer(configuration, model, lr), config=config)[0]
    try:
        yield training
    finally:
        training.destroy()


def _optimizer(configuration: Configuration, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    if configuration.masters == "fp32":
        return torch.optim.SGD(model.parameters(), lr=lr)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(model.parameters(), lr=lr)


def announce(engine: Any, micro_batches: int, window_end: bool) -> None:
    """Announce a request to an engine of requestzero, as the front ends do; stock has no such call."""
    if hasattr(engine, "begin_request"):
        engine.begin_request(micro_batches=micro_batches, window_end=window_end)
