"""Engines for a :class:`Setup`, and the exact layers that they train; every function runs on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from requestzero.doctor.verify.setup import Setup
from requestzero.probe.windows import LR, ExactLayers, Micro, values


class Layers(ExactLayers):
    """The exact layers, each under activation checkpointing if asked for."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.checkpointing = checkpointing

    @override
    def run_layer(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing == "none":
            return super().run_layer(layer, x)
        return checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")


def build(
    setup: Setup, requestzero: bool = True, model: torch.nn.Module | None = None, lr: float = LR, **options: Any
) -> Any:
    """Return an engine of this package, or DeepSpeed's own, for ``setup`` (on this rank).

    Args:
        setup: the configuration.
        requestzero: ``False`` for DeepSpeed's own engine.
        model: the module; by default :class:`Layers`.
        lr: learning rate.
        **options: more arguments of the optimizer.
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


def inputs_of(engine: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` and ``w`` of this rank in the micro-batch of this seed, in the model's dtype."""
    import deepspeed.comm as dist

    dtype = next(engine.module.parameters()).dtype
    x, w = values(seed, dist.get_rank(), dist.get_world_size())
    return x.to(engine.device, dtype), w.to(engine.device, dtype)


def backward(engine: Any, micro: Micro, mark: bool = True, factor: float = 1.0) -> None:
    """Run one micro-batch of this rank.

    Args:
        engine: of exact layers.
        micro: the micro-batch.
        mark: say whether it ends its request.
        factor: of its loss.
    """
    if mark:
        engine.set_gradient_accumulation_boundary(micro.request_end)
    x, w = inputs_of(engine, micro.seed)
    if engine.module.checkpointing == "reentrant":
        x.requires_grad_()
    loss = engine(x, w, micro.uses)
    engine.backward(loss if factor == 1.0 else loss * factor)


def masters(engine: Any) -> list[torch.Tensor]:
    """Return the full fp32 master weight of every layer, on the CPU (collective)."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    return [weight.detach().cpu().clone() for weight in found if weight is not None]


def masters_and_state(engine: Any) -> list[torch.Tensor]:
    """Return the master weights, and this rank's part of what the optimizer keeps beside them (collective)."""
    state = engine.optimizer.state
    kept = [v for flat in flat_masters(engine) for v in state[flat].values() if torch.is_tensor(v)]
    return [*masters(engine), *(v.clone() for v in kept)]


def flat_masters(engine: Any) -> list[torch.Tensor]:
    """Return this rank's flat master weights, by parameter group, at stage 3 by sub-group."""
    optimizer, is_stage_3 = engine.optimizer, engine.zero_optimization_stage() == 3
    flats: list[torch.Tensor] = (
        optimizer.fp32_partitioned_groups_flat if is_stage_3 else optimizer.single_partition_of_fp32_groups
    )
    return flats


def module_weights(engine: Any) -> list[torch.Tensor]:
    """Return the module's own weights, in fp32 on the CPU (collective at stage 3, where they are gathered)."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    params = list(engine.module.parameters())
    with GatheredParameters(params, enabled=engine.zero_optimization_stage() == 3):
        return [p.detach().float().cpu().clone() for p in params]


def difference(before: list[torch.Tensor], after: list[torch.Tensor], lr: float = LR) -> list[torch.Tensor]:
    """Return the gradient of every layer that plain SGD has applied between the two, in fp64."""
    return [(b - a).double() / lr for b, a in zip(before, after, strict=True)]
