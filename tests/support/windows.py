"""Update windows of the probe's exact layers: how a rank runs them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from requestzero.probe.windows import (  # noqa: F401 (tests import them from here)
    IN,
    LR,
    OUTS,
    ExactLayers,
    Micro,
    Window,
    reference,
    values,
    wrong_updates,
)

ALL = (True,) * len(OUTS)
"""A micro-batch that uses every layer."""


class Layers(ExactLayers):
    """The exact layers, each under activation checkpointing if asked for."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.checkpointing = checkpointing

    @override
    def run_layer(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing == "none":
            return super().run_layer(layer, x)
        return checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")


def inputs_of(engine: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` and ``w`` of this rank in the micro-batch of this seed, in the model's dtype."""
    import deepspeed.comm as dist

    dtype = next(engine.module.parameters()).dtype
    x, w = values(seed, dist.get_rank(), dist.get_world_size())
    return x.to(engine.device, dtype), w.to(engine.device, dtype)


def backward(engine: Any, micro: Micro, mark: bool = True) -> None:
    """Run one micro-batch of this rank; ``mark``: say whether it ends its request."""
    if mark:
        engine.set_gradient_accumulation_boundary(micro.request_end)
    x, w = inputs_of(engine, micro.seed)
    if engine.module.checkpointing == "reentrant":
        x.requires_grad_()
    engine.backward(engine(x, w, micro.uses))
