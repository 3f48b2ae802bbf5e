"""A program that knows nothing of requestzero: a bare ``Accelerator()``, or DeepSpeed by itself. See ``run/``."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.weight * batch.to(self.weight.dtype)).sum()


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Of ``__main__``: a spawned worker has to find it."""

    rows = torch.tensor([1.0, 3.0, 2.0, 6.0, 5.0, 7.0, 4.0, 8.0]).repeat_interleave(3).view(8, 3)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def whole(weight: torch.Tensor) -> list[float]:
    """Its values, of which a rank has a part at stage 3."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([weight], enabled=hasattr(weight, "ds_id")):
        values: list[float] = weight.tolist()
        return values


def with_accelerate() -> tuple[Any, torch.Tensor]:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=1, num_workers=1, multiprocessing_context="spawn")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()
    return model, accelerator.unwrap_model(model).weight


def with_deepspeed(stage: int = 2) -> tuple[Any, torch.Tensor]:
    import deepspeed

    model = Line()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=True)
    for batch in Numbers.rows[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]:
        engine.backward(engine(batch))
        engine.step()
    return engine, engine.module.weight


def main(how: str, directory: str) -> None:
    """``how``: by whom the engine is built; ``"deepspeed"`` builds one of stage 2 and then one of stage 3."""
    built = [with_accelerate] if how == "accelerate" else [with_deepspeed, partial(with_deepspeed, 3)]
    facts = []
    for engine, weight in (build() for build in built):
        facts.append(f"{os.environ['WORLD_SIZE']} {type(engine.optimizer).__name__} {whole(weight)}")
    Path(directory, f"rank{os.environ['RANK']}.txt").write_text("\n".join(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
