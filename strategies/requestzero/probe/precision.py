"""Rounding error of a long window's sum."""

from __future__ import annotations

import torch

from requestzero.probe.engines import built
from requestzero.probe.grid import Configuration, Engine
from requestzero.probe.updates import on_cpu

MICRO_BATCHES = 16
_SIZE = 64


class OneWeight(torch.nn.Module):
    """A loss whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(_SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def measure_precision(configuration: Configuration, engine: Engine) -> dict[str, float]:
    """Measure ``precision``, the largest relative error of a window against its exact sum (collective).

    The window is one request of ``MICRO_BATCHES``, with gradients between 1 and 2 in the model's dtype, the same on all
    ranks. Its sum is read by ``safe_get_full_grad`` before the step.
    """
    from deepspeed.utils import safe_get_full_grad

    generator = torch.Generator().manual_seed(3)
    exact = torch.zeros(_SIZE, dtype=torch.float64)
    with built(configuration, engine, OneWeight(), lr=1.0) as training:
        weight = training.module.weight
        for i in range(MICRO_BATCHES):
            x = (1 + torch.rand(_SIZE, generator=generator)).to(weight.dtype)
            exact += x.double()
            training.set_gradient_accumulation_boundary(i == MICRO_BATCHES - 1)
            training.backward(training(x.to(training.device)))
        found = on_cpu(safe_get_full_grad(weight)).double()
    return {"precision": ((found - exact) / exact).abs().max().item()}
