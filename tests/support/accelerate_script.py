"""A user's script for Accelerate: a model, a loader, a loop. Started by ``accelerate/test_launch.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from requestzero import RequestZeROPlugin


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.weight * batch.to(self.weight.dtype)).sum()


def main(directory: str) -> None:
    accelerator = Accelerator(deepspeed_plugin=RequestZeROPlugin(), gradient_accumulation_steps=2)
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    numbers = torch.tensor([1.0, 3.0, 2.0, 6.0, 5.0, 7.0]).repeat_interleave(3).view(6, 3)
    loader = torch.utils.data.DataLoader(numbers, batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()
    import deepspeed

    engine = accelerator.deepspeed_engine_wrapped.engine
    facts = [accelerator.num_processes, engine.applied_updates, type(engine.optimizer).__name__, engine.device.type]
    facts += [type(engine.optimizer.optimizer).__name__, accelerator.mixed_precision, engine.zero_use_cpu_optimizer()]
    weight = accelerator.unwrap_model(model).weight
    with deepspeed.zero.GatheredParameters([weight], enabled=engine.zero_optimization_partition_weights()):
        weights = weight.tolist()
    Path(directory, f"rank{accelerator.process_index}.txt").write_text(" ".join(map(str, [*facts, weights])))
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
