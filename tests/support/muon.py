"""Engines with Muon, and what they train."""

from __future__ import annotations

from typing import Any

import torch

from support.engines import flat_masters
from support.setup import Setup
from support.windows import IN


class Matrices(torch.nn.Module):
    """Three matrices of different sizes, the second of which the border between two ranks splits, and biases.

    Gradients are small integers, exact in every dtype: Muon orthogonalises in bf16, which amplifies a difference in the
    last place of its input by more than any tolerance that would still see a mistake.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = torch.nn.Linear(IN, 6), torch.nn.Linear(6, 8), torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, use_b: bool = True) -> torch.Tensor:
        wide = x.repeat(1, 2)
        outputs = [self.a(x), self.b(wide[:, :6]), self.c(wide)] if use_b else [self.a(x), self.c(wide)]
        return sum((output * self._factors(x, output.shape[1])).sum() for output in outputs)

    @staticmethod
    def _factors(x: torch.Tensor, width: int) -> torch.Tensor:
        return (x.sum(1, keepdim=True) / 2 + torch.arange(width, device=x.device)) % 5 - 2


def build_muon(
    stage: int, offload: bool, model: str, accum: str, requestzero: bool = True, abort: bool = False, **config: Any
) -> Any:
    """Return an engine of this package, or DeepSpeed's own, that trains :class:`Matrices` (on this rank)."""
    import deepspeed

    import requestzero as ours

    config = Setup(stage=stage, offload=offload, model=model, accum=accum).deepspeed_config() | {
        "gradient_clipping": 1.0,
        # PyTorch's Adam beside Muon: DeepSpeed's would compile for minutes.
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95, "torch_adam": True}},
        **config,
        **({"requestzero": {"abort": True}} if abort else {}),
    }
    return (ours if requestzero else deepspeed).initialize(model=Matrices(), config=config)[0]


def batch(engine: Any, step: int, request: int) -> torch.Tensor:
    """Even integers of this rank, so that the mean over two ranks is exact."""
    import deepspeed.comm as dist

    generator = torch.Generator().manual_seed(1000 * step + 10 * request + dist.get_rank())
    return (2 * torch.randint(-2, 3, (3, IN), generator=generator)).to(
        engine.device, next(engine.module.parameters()).dtype
    )


def momentum(engine: Any) -> list[torch.Tensor]:
    """This rank's momentum, and everything else that the inner optimizer keeps."""
    state = engine.optimizer.optimizer.state
    flats = flat_masters(engine)
    return [v.detach().float().clone() for flat in flats for v in state.get(flat, {}).values() if torch.is_tensor(v)]
