"""A model of two weights whose gradients are numbers, and the updates that an engine makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from support.engines import masters
from support.models import WIDTH
from support.stage_3 import change_of

Change = list[float]
"""The gradient that was applied to each of two weights, whose elements are all equal."""


class TwoWeights(torch.nn.Module):
    """Two weights, zero at first, whose gradients are the inputs; a weight whose input is 0 takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))

    def forward(self, first: float, second: float, segments: bool = False) -> torch.Tensor:
        parts = [(self.first, first), (self.second, second)]
        if segments:
            parts = [(self.first, first / 4), (self.second, second), (self.first, first * 3 / 4)]
        return torch.stack([self.part(*part, segments) for part in parts if part[1]]).sum()

    def part(self, weight: torch.Tensor, value: float, segment: bool) -> torch.Tensor:
        def product(x: torch.Tensor) -> torch.Tensor:
            return (weight * x).sum()

        x = torch.full_like(weight, value, requires_grad=True)
        return checkpoint(product, x, use_reentrant=True) if segment else product(x)


def feed(engine: Any, first: float, second: float = 0.0, end: bool = True, segments: bool = False) -> None:
    """Run a micro-batch with these gradients on all ranks; without managed accumulation requests have no ends."""
    if engine._config.managed_gradient_accumulation:
        engine.set_gradient_accumulation_boundary(end)
    engine.backward(engine(first, second, segments))


def applied(engine: Any, run: Callable[[], None]) -> Change:
    before = masters(engine)
    run()
    engine.step()
    return change_of(engine, before)
