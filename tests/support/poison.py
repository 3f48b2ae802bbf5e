"""Backwards that go wrong: a gradient that is not finite in one element on one rank, or an exception in the middle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.windows import ALL, Micro, backward

SPLIT = 3
"""The layer that the border between the partitions of two ranks splits: its first two elements are rank 0's."""


def poisoned_backward(engine: Any, micro: Micro, poison: float, rank: int, layer: int = -1, element: int = -1) -> None:
    """As :func:`support.windows.backward`, with ``poison`` in one element of one layer's gradient on one rank."""
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


def interrupt_backward(engine: Any) -> None:
    """Run a backward that an exception ends in the middle, as the first layer's gradient arrives."""
    handle = engine.module.layers[0].weight.register_hook(lambda grad: (_ for _ in ()).throw(KeyError("interrupted")))
    with pytest.raises(KeyError, match="interrupted"):
        backward(engine, Micro(ALL, 2))
    handle.remove()
