"""Random update windows whose gradients are exact in every dtype, and their sums.

Every layer gets ``x`` and its outputs are weighted with ``w``; both are small integers, so that a layer's gradient is
the outer product of ``w`` and ``x`` and all sums of a window fit into bf16 without rounding.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

IN = 4
OUTS = (3, 5, 1, 6, 4)  # a partition border falls inside a layer for two and three ranks
LR = 1 / 16
RANKS_WITH_VALUES = 4
"""In one micro-batch at most. A gradient is at most 4 on each, so that ``LONGEST`` micro-batches stay below 256."""
LONGEST = 16
"""Micro-batches in a random window at most."""


@dataclass(frozen=True)
class Micro:
    """One micro-batch: the layers that it uses, one seed of values per rank, and the mark of a request's end."""

    uses: tuple[bool, ...]
    seed: int
    request_end: bool = True


Window = list[Micro]


class ExactLayers(torch.nn.Module):
    """Parallel linear layers without bias that begin as zeros; ``uses`` selects those that take part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(IN, out, bias=False) for out in OUTS)
        for param in self.parameters():
            torch.nn.init.zeros_(param)

    def forward(self, x: torch.Tensor, w: torch.Tensor, uses: tuple[bool, ...]) -> torch.Tensor:
        """Return the loss, a scalar, for ``x`` of ``IN`` and ``w`` of ``max(OUTS)`` elements."""
        total = x.sum() * 0
        for layer, used in zip(self.layers, uses, strict=True):
            if used:
                total = total + (self.run_layer(layer, x) * w[: layer.out_features]).sum()
        return total

    def run_layer(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)


def values(seed: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` (a multiple of the world size, so that the mean over ranks is exact) and ``w`` of a micro-batch."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    x = torch.randint(-2, 3, (IN,), generator=generator).float() * world_size
    w = torch.randint(-2, 3, (max(OUTS),), generator=generator).float()
    return x * ((rank - seed) % world_size < RANKS_WITH_VALUES), w


def random_windows(count: int, requests: int, seed: int) -> list[Window]:
    """Return random windows, the same on every rank: up to ``requests`` requests of one to three micro-batches each.

    In every window up to two parameters are absent; the others come late, in part, or in non-boundary backwards only.
    """
    chance = random.Random(seed)
    return [_random_window(chance, requests) for _ in range(count)]


def _random_window(chance: random.Random, requests: int) -> Window:
    absent = set(chance.sample(range(len(OUTS)), chance.randint(0, 2)))
    present = [i for i in range(len(OUTS)) if i not in absent]
    window: Window = []
    for _ in range(chance.randint(1, requests)):
        length = chance.randint(1, 3)
        if len(window) + length > LONGEST:
            break
        for position in range(length):
            used = {i for i in present if chance.random() < 0.6} | {chance.choice(present)}
            uses = tuple(i in used for i in range(len(OUTS)))
            window.append(Micro(uses, chance.randrange(10**6), position == length - 1))
    return window


def reference(windows: list[Window], world_size: int) -> list[list[torch.Tensor]]:
    """Compute in fp64 per window each layer's gradient, summed over micro-batches and averaged over ranks."""
    model = ExactLayers().double()
    expected = []
    for window in windows:
        model.zero_grad(set_to_none=False)
        for micro in window:
            for rank in range(world_size):
                x, w = (v.double() for v in values(micro.seed, rank, world_size))
                (model(x, w, micro.uses) / world_size).backward()
        expected.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
        for p in model.parameters():
            p.grad = None
    return expected


def wrong_updates(applied: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> int:
    """Count the parameter updates that differ from the reference in any bit."""
    return sum(
        not torch.equal(a, e)
        for window_a, window_e in zip(applied, expected, strict=True)
        for a, e in zip(window_a, window_e, strict=True)
    )
