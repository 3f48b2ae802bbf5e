"""Loops written for Accelerate, run on the ranks that call them, with everything a test wants to compare recorded.

The model's gradient is the batch itself, so that sums, means and weights are exact in fp32 as long as the data are
small binary fractions; the ranks get different data. ``plugin=False`` runs the very same loop without DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.utils import clip_grad_norm_

import requestzero.accelerate
from requestzero import RequestZeROPlugin
from support.accelerate_state import fresh
from support.models import WIDTH, RowWeight
from support.whole_weights import whole


@dataclass
class Loop:
    """A training loop, in picklable terms."""

    plugin: dict[str, Any] | None = field(default_factory=dict)
    """Arguments of the plugin; ``None``: DDP."""
    accelerator: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    """``gradient_accumulation_steps``."""
    batches: int = 8
    """Per rank and epoch."""
    epochs: int = 1
    clip: float | None = None
    clip_by_torch: bool = False
    """By PyTorch's function, imported before there is an engine."""
    optimizer: str = "sgd"
    lr: float = 0.5
    schedule: bool = True
    nan_at: tuple[int, ...] = ()
    """Micro-batches (over all epochs) in which rank 0 has a NaN."""
    backwards: int = 1
    """Backwards in one ``accumulate`` block."""
    own_class: bool = False
    """Use ``requestzero.accelerate.Accelerator``, with nothing patched."""


def make_accelerator(loop: Loop) -> Accelerator:
    arguments: dict[str, Any] = {"gradient_accumulation_steps": loop.n, **loop.accelerator}
    cls = requestzero.accelerate.Accelerator if loop.own_class else Accelerator
    if loop.plugin is None:
        return cls(cpu=not torch.cuda.is_available(), **arguments)
    return cls(deepspeed_plugin=RequestZeROPlugin(**loop.plugin), **arguments)


def data(count: int, ranks: int) -> torch.Tensor:
    """One row for each rank of each micro-batch: small multiples of 1/4, different everywhere."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-8, 9, (count * ranks, WIDTH), generator=generator) / 4


def make_optimizer(loop: Loop, model: torch.nn.Module) -> torch.optim.Optimizer:
    if loop.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=loop.lr)
    return torch.optim.AdamW(model.parameters(), lr=loop.lr)


def prepare(loop: Loop) -> tuple[Any, ...]:
    """``accelerator, model, optimizer, loader, scheduler``."""
    accelerator = make_accelerator(loop)
    model = RowWeight()
    optimizer = make_optimizer(loop, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // accelerator.num_processes))
    loader = torch.utils.data.DataLoader(data(loop.batches, accelerator.num_processes), batch_size=1)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def weights(accelerator: Accelerator, model: torch.nn.Module) -> list[float]:
    weight = accelerator.unwrap_model(model).weight
    with whole([weight]):
        return weight.detach().float().cpu().tolist()


def train(loop: Loop, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """The loop of Accelerate's documentation."""
    with fresh(**environment or {}):
        accelerator, model, optimizer, loader, scheduler = prepare(loop)
        record: dict[str, Any] = {"updates": [], "synced": [], "steps": accelerator.gradient_accumulation_steps}
        count = 0
        for _ in range(loop.epochs):
            for batch in loader:
                with accelerator.accumulate(model):
                    batch = batch.to(next(model.parameters()).dtype)
                    if count in loop.nan_at and accelerator.process_index == 0:
                        batch = batch * float("nan")
                    for _ in range(loop.backwards):
                        accelerator.backward(model(batch))
                    norm = None
                    if accelerator.sync_gradients and loop.clip is not None:
                        function = clip_grad_norm_ if loop.clip_by_torch else accelerator.clip_grad_norm_
                        norm = float(function(model.parameters(), loop.clip))
                    optimizer.step()
                    if loop.schedule:
                        scheduler.step()
                    optimizer.zero_grad()
                count += 1
                record["synced"].append(accelerator.sync_gradients)
                if accelerator.sync_gradients:
                    record["updates"].append(
                        {
                            "weights": weights(accelerator, model),
                            "lr": optimizer.param_groups[0]["lr"],
                            "norm": norm,
                            "skipped": (optimizer.step_was_skipped, accelerator.optimizer_step_was_skipped),
                        }
                    )
        wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
        if wrapped is not None:
            record["counts"] = (wrapped.engine.global_steps, wrapped.engine.applied_updates)
            record["config"] = accelerator.deepspeed_config
            record["metrics"] = accelerator.deepspeed_plugin.metrics(accelerator)
        accelerator.free_memory()
        return record
