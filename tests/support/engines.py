"""Engines for a :class:`Setup`, and what they hold; every function runs on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from support.setup import Setup
from support.windows import LR, Layers


def build(
    setup: Setup, requestzero: bool = True, model: torch.nn.Module | None = None, lr: float = LR, **options: Any
) -> Any:
    """Return an engine of this package, or DeepSpeed's own, for ``setup`` (on this rank).

    Args:
        setup: the configuration.
        requestzero: ``False`` for DeepSpeed's own engine.
        model: the module; by default :class:`Layers`.
        lr: learning rate.
        options: more arguments of the optimizer.
    """
    import deepspeed

    import requestzero as ours

    torch.manual_seed(0)
    module = Layers(setup.checkpointing) if model is None else model
    params = list(module.parameters())
    groups = [{"params": params[i :: setup.groups]} for i in range(setup.groups)]
    optimizer = _optimizer_class(setup.optimizer)(groups, lr=lr, **options)
    initialize = ours.initialize if requestzero else deepspeed.initialize
    return initialize(model=module, optimizer=optimizer, config=setup.deepspeed_config(requestzero))[0]


def _optimizer_class(name: str) -> Any:
    if name == "cpu_adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam
    return {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]


def masters(engine: Any) -> list[torch.Tensor]:
    """Full fp32 master weight of every layer, on the CPU (collective)."""
    from deepspeed.utils import safe_get_full_fp32_param

    return [safe_get_full_fp32_param(p).detach().cpu().clone() for p in engine.module.parameters()]


def masters_and_state(engine: Any) -> list[torch.Tensor]:
    """The master weights, and this rank's part of what the optimizer keeps beside them (collective)."""
    flats = engine.optimizer.single_partition_of_fp32_groups
    kept = [v for flat in flats for v in engine.optimizer.state[flat].values() if torch.is_tensor(v)]
    return [*masters(engine), *(v.clone() for v in kept)]


def module_weights(engine: Any) -> list[torch.Tensor]:
    """The module's own weights, in fp32 on the CPU."""
    return [p.detach().float().cpu().clone() for p in engine.module.parameters()]
