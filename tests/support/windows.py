"""Update windows for tests: the probe's exact layers and reference, in every configuration, and the runner."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from requestzero.probe.windows import (  # noqa: F401 (tests take them from here)
    IN,
    LR,
    OUTS,
    ExactLayers,
    Micro,
    Window,
    reference,
    values,
    wrong_updates,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class OneWeight(torch.nn.Module):
    """A loss whose gradient is its input."""

    checkpointing = "none"

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@dataclass(frozen=True)
class Setup:
    """One configuration of the grid."""

    stage: int = 2
    offload: bool = False
    model: str = "fp32"
    accum: str = "fp32"
    checkpointing: str = "none"
    groups: int = 1
    managed: bool = True
    retain: bool | str = False
    optimizer: str = "sgd"
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        default = asdict(Setup())
        options = {k: v for k, v in asdict(self).items() if v != default[k]}
        return " ".join(f"{k}={v}" for k, v in options.items()) or "default"

    def deepspeed_config(self, requestzero: bool = True) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, **self.zero}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.retain and requestzero:
            zero["retain_gpu_grad_partition_until_step"] = self.retain
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "data_types": {"grad_accum_dtype": self.accum},
            "managed_gradient_accumulation": self.managed,
        }
        if self.model != "fp32":
            config[self.model] = {"enabled": True}
        return config | self.config


class Layers(ExactLayers):
    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.checkpointing = checkpointing

    @override
    def run_layer(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing == "none":
            return super().run_layer(layer, x)
        return checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")


def build(setup: Setup, requestzero: bool = True, model: torch.nn.Module | None = None, lr: float = LR) -> Any:
    """An engine of this package, or DeepSpeed's own, for ``setup`` (on this rank)."""
    import deepspeed

    import requestzero as ours

    torch.manual_seed(0)
    module = Layers(setup.checkpointing) if model is None else model
    params = list(module.parameters())
    groups = [{"params": params[i :: setup.groups]} for i in range(setup.groups)]
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, lr=lr) if setup.optimizer == "sgd" else torch.optim.AdamW(groups, lr=lr)
    )
    initialize = ours.initialize if requestzero else deepspeed.initialize
    return initialize(model=module, optimizer=optimizer, config=setup.deepspeed_config(requestzero))[0]


def backward(engine: Any, micro: Micro, mark: bool = True) -> None:
    """One micro-batch of this rank."""
    import deepspeed.comm as dist

    if mark:
        engine.set_gradient_accumulation_boundary(micro.request_end)
    dtype = next(engine.module.parameters()).dtype
    x, w = (v.to(engine.device, dtype) for v in values(micro.seed, dist.get_rank(), dist.get_world_size()))
    if engine.module.checkpointing == "reentrant":
        x.requires_grad_()
    engine.backward(engine(x, w, micro.uses))


def masters(engine: Any) -> list[torch.Tensor]:
    """Full fp32 master weight of every layer, on the CPU (collective)."""
    from deepspeed.utils import safe_get_full_fp32_param

    return [safe_get_full_fp32_param(p).detach().cpu().clone() for p in engine.module.parameters()]


def run_windows(setup: Setup, windows: list[Window], requestzero: bool = True) -> list[list[torch.Tensor]]:
    """On this rank: train over ``windows``; for each the applied gradient of every layer, ``(before - after) / lr``."""
    with Fp16OnCpu() if setup.model == "fp16" else nullcontext():
        engine = build(setup, requestzero)
        applied = []
        try:
            after = _weights(engine, requestzero)
            for window in windows:
                before = after
                for micro in window:
                    backward(engine, micro, mark=setup.managed)
                if setup.managed:
                    engine.set_gradient_accumulation_boundary(True)
                engine.step()
                after = _weights(engine, requestzero)
                applied.append([(b - a).double() / LR for b, a in zip(before, after, strict=True)])
        finally:
            engine.destroy()
    return applied


class Fp16OnCpu:
    """DeepSpeed's CPU accelerator refuses fp16 although torch computes it: open that one gate."""

    def __enter__(self) -> None:
        from deepspeed.accelerator import get_accelerator

        kind = type(get_accelerator())
        self._patches = [
            patch.object(kind, "is_fp16_supported", lambda self: True),
            patch.object(kind, "supported_dtypes", lambda self: [torch.float32, torch.bfloat16, torch.float16]),
        ]
        for each in self._patches:
            each.start()

    def __exit__(self, *details: Any) -> None:
        for each in self._patches:
            each.stop()


def _weights(engine: Any, requestzero: bool) -> list[torch.Tensor]:
    # Stock reads another parameter's master weights under round_robin_gradients.
    return masters(engine) if requestzero else [p.detach().cpu().clone() for p in engine.module.parameters()]
