"""Models whose gradients are known: the input, or a part of it."""

from __future__ import annotations

from typing import Any

import torch

WIDTH = 8


class OneWeight(torch.nn.Module):
    """One weight, zero at first, whose gradient is the input."""

    def __init__(self, size: int = WIDTH) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


class RowWeight(OneWeight):
    """The same over the rows of a batch, with their mean as the loss."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.weight * batch).sum(1).mean()


class LossOfRowWeight(RowWeight):
    """The same as Transformers' Trainer calls it: a mapping with the loss."""

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": super().forward(batch.to(self.weight.dtype))}


def feed(engine: Any, value: float, request_end: bool = True) -> None:
    """Run a micro-batch of a :class:`OneWeight` whose gradient is ``value`` in every element."""
    engine.set_gradient_accumulation_boundary(request_end)
    engine.backward(engine(torch.full_like(engine.module.weight, value)))


def full_grad(engine: Any) -> torch.Tensor:
    """The gradient that is accumulated for the weight of a :class:`OneWeight`, on the CPU (collective)."""
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(engine.module.weight).detach().cpu().clone()


class Few(torch.nn.Module):
    """Weights of a few elements each; every element's gradient is the input, a number."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, x: float) -> torch.Tensor:
        return sum((weight.sum() * x for weight in self.weights), torch.zeros((), device=self.weights[0].device))


class Numbered(torch.nn.Module):
    """Four weights of four elements, all 1, 2, 3 and 4, for tests that read them."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(4):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.full((4,), float(i + 1))))
