"""Sequences of uneven length, cut into requests, micro-batches and ranks in many ways, and what all of them must give.

A sequence's gradient is its vector of values, a multiple of 12, so that sums and their means over one to four ranks are
exact in every dtype; its weight is its number of tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

SIZES = (3, 5, 1, 4)  # a border between partitions falls inside a parameter for two to four ranks
RANKS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Sequence:
    values: tuple[int, ...]
    tokens: int


Micro = list[Sequence]
"""What one rank runs in a backward; empty for a filler."""
Round = list[Micro]
"""One micro-batch of every rank."""
Request = list[Round]


class Sliced(torch.nn.Module):
    """Parameters of different sizes, whose gradients are slices of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(size)) for size in SIZES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return sum((part * piece).sum() for part, piece in zip(self.parts, values.split(SIZES), strict=True))


def draw(seed: int, total: int, count: int = 12) -> list[Sequence]:
    """``count`` sequences with ``total`` tokens together, some of which have none."""
    generator = random.Random(seed)
    marks = sorted(generator.randint(0, total) for _ in range(count - 1))
    tokens = [end - start for start, end in zip([0, *marks], [*marks, total], strict=True)]
    return [Sequence(tuple(12 * generator.randint(-2, 2) for _ in range(sum(SIZES))), n) for n in tokens]


def cut(sequences: list[Sequence], ranks: int, seed: int) -> list[Request]:
    """Requests in some order, one of which has no sequence, each of several rounds; equally many for every rank."""
    generator = random.Random(seed)
    shuffled = generator.sample(sequences, len(sequences))
    requests = generator.randint(1, 4)
    edges = [0, *sorted(generator.randint(0, len(shuffled)) for _ in range(requests - 1)), len(shuffled)]
    groups = [shuffled[start:end] for start, end in pairwise(edges)]
    return generator.sample([_deal(group, ranks, generator) for group in [*groups, []]], requests + 1)


def _deal(group: list[Sequence], ranks: int, generator: random.Random) -> Request:
    rounds: Request = [[[] for _ in range(ranks)] for _ in range(generator.randint(1, 3))]
    for sequence in group:
        generator.choice(generator.choice(rounds)).append(sequence)
    return rounds


def reference(windows: list[list[Sequence]], lr: float, momentum: float) -> list[torch.Tensor]:
    """The flattened parameters after each window, by plain PyTorch in fp32: one division, correctly rounded."""
    parameter = torch.nn.Parameter(torch.zeros(sum(SIZES)))
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum)
    after = []
    for window in windows:
        weight = sum(sequence.tokens for sequence in window)
        if weight:
            parameter.grad = torch.tensor([s.values for s in window]).sum(0).float() / weight
            optimizer.step()
        after.append(parameter.detach().clone())
    return after


def run_window(engine: Any, requests: list[Request], rank: int, as_tensor: bool) -> None:
    """All backwards of a window on this rank, each with its weight; losses are sums."""
    dtype = next(engine.module.parameters()).dtype
    for request in requests:
        for position, micros in enumerate(request):
            engine.set_gradient_accumulation_boundary(position == len(request) - 1)
            values = torch.tensor([s.values for s in micros[rank]] or [[0] * sum(SIZES)]).sum(0)
            tokens: Any = sum(s.tokens for s in micros[rank])
            if as_tensor:
                tokens = torch.tensor(tokens, device=engine.device)
            engine.backward(engine(values.to(engine.device, dtype)), weight=tokens)
