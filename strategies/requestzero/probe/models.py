"""The models for memory, traffic and times, and their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from requestzero.environment.fp32_matmuls import run_in_fp32

TOKENS = 64
"""Of one micro-batch of a Hugging Face model."""


class Chain(torch.nn.Module):
    """A sequence of linear layers, which begin as the identity so that no gradient vanishes."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        for param in self.parameters():
            torch.nn.init.eye_(param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class CausalLoss(torch.nn.Module):
    """A Hugging Face model as a function from tokens, ``(1, TOKENS)``, to its loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def _hugging_face(path: str) -> CausalLoss:
    from transformers import AutoModelForCausalLM

    return CausalLoss(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


@dataclass(frozen=True)
class Shape:
    """Trainable parameters of a model, and the tensors that they lie in."""

    parameters: int
    tensors: int


@dataclass(frozen=True)
class ModelChoice:
    """A model to build: a chain, or the Hugging Face model in the directory ``path``."""

    layers: int
    width: int
    path: str | None = None
    fp32_matmuls: bool = False
    """Compute the model's matrix products in fp32, whatever its dtype."""

    def build(self) -> torch.nn.Module:
        """Build the model in fp32 on the CPU, the same on every rank."""
        torch.manual_seed(0)
        model = Chain(self.layers, self.width) if self.path is None else _hugging_face(self.path)
        if self.fp32_matmuls:
            run_in_fp32(model)
        return model

    def shape(self) -> Shape:
        """Build the model and count its parameters."""
        sizes = [p.numel() for p in self.build().parameters()]
        return Shape(sum(sizes), len(sizes))

    def inputs(self, engine: Any) -> torch.Tensor:
        """Return a micro-batch on the engine's device: ones in the model's dtype, ``(1, width)``, or random tokens."""
        if self.path is None:
            dtype = next(engine.module.parameters()).dtype
            return torch.ones(1, self.width, dtype=dtype, device=engine.device)
        vocabulary = engine.module.model.config.vocab_size
        generator = torch.Generator().manual_seed(engine.global_rank)
        return torch.randint(vocabulary, (1, TOKENS), generator=generator).to(engine.device)
