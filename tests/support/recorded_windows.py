"""Small windows with known gradients and the model that they are for; ``recorded_windows.json`` describes both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))["cases"]


class TwoLayers(torch.nn.Module):
    """Two layers without bias, all weights zero; a micro-batch says which of them it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        for param in self.parameters():
            torch.nn.init.zeros_(param)

    def forward(self, x: torch.Tensor, uses: list[int]) -> torch.Tensor:
        return sum((layer(x).sum() for layer, used in zip(self.layers, uses, strict=True) if used), x.sum() * 0)
