"""Micro-batches whose gradient is not finite in one element, on one rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from support.windows import Micro, backward

SPLIT = 3
"""The layer that the border between the partitions of two ranks splits: its first two elements are rank 0's."""


def poisoned_backward(engine: Any, micro: Micro, poison: float, rank: int, layer: int = -1, element: int = -1) -> None:
    """As :func:`windows.backward`, with ``poison`` in one element of one layer's gradient on one rank."""
    import deepspeed.comm as dist

    def poisoned(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[element] = poison
        return grad

    weight = engine.module.layers[layer].weight
    handle = weight.register_hook(poisoned) if dist.get_rank() == rank else None
    backward(engine, micro)
    if handle is not None:
        handle.remove()


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """What a logger is told from warnings on while the block runs."""
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger, listener = logging.getLogger(name), Listener(logging.WARNING)
    before = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield told
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before)
