"""Engines of ZeRO 3 for tests, and what of their windows is wrong; every function runs on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from support.engines import build, masters
from support.fp16 import fp16_where_needed
from support.setup import Setup
from support.updates import difference
from support.windows import IN, OUTS, Micro, Window, backward, reference

PARAMS = {"offload_param": {"device": "cpu"}}
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "optimizer": {"offload": True},
    "params": {"zero": PARAMS},
    "both": {"offload": True, "zero": PARAMS},
}
"""What is offloaded, as fields of a :class:`Setup`."""
GATHERED = {"stage3_param_persistence_threshold": 0}
"""By default DeepSpeed leaves parameters as small as those of the tests gathered."""


def setup_of(place: str, **fields: Any) -> Setup:
    """Return a configuration in a place of :data:`PLACES`, with more fields of a :class:`Setup`."""
    offloads = dict(PLACES[place])
    zero = {**offloads.pop("zero", {}), **fields.pop("zero", {})}
    return Setup(stage=3, zero=zero, **offloads, **fields)


class Pair(torch.nn.Module):
    """A weight and a vector, which are gathered together and used each by itself; the vector has a row's gradient."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(out, IN))
        self.vector = torch.nn.Parameter(torch.zeros(out))

    def forward(self, x: torch.Tensor, weight: bool, vector: bool) -> torch.Tensor:
        return (self.weight @ x if weight else 0) + (self.vector * x[0] if vector else 0)


@dataclass(frozen=True)
class Model:
    """How the module is built."""

    twice: bool = False
    """Every pair that is used is used twice in one backward, with those of the others in between."""
    sharded: bool = False
    """Under ``deepspeed.zero.Init``."""


class Pairs(torch.nn.Module):
    """The exact layers as pairs; ``uses`` selects weights, then vectors."""

    def __init__(self, checkpointing: str, twice: bool) -> None:
        super().__init__()
        self.pairs = torch.nn.ModuleList(Pair(out) for out in OUTS)
        self.checkpointing, self.times = checkpointing, 1 + twice

    def forward(self, x: torch.Tensor, w: torch.Tensor, uses: tuple[bool, ...]) -> torch.Tensor:
        total = x.sum() * 0
        for pair, out, *used in self.times * list(zip(self.pairs, OUTS, uses, uses[len(OUTS) :], strict=False)):
            if any(used):
                total = total + (self.run(pair, x, *used) * w[:out]).sum()
        return total

    def run(self, pair: torch.nn.Module, x: torch.Tensor, *used: bool) -> Any:
        if self.checkpointing == "none":
            return pair(x, *used)
        return checkpoint(pair, x, *used, use_reentrant=self.checkpointing == "reentrant")


def paired(window: Window) -> Window:
    """Let a micro-batch use the weight, the vector or both of every layer that it uses, as its seed says."""

    def halves(micro: Micro) -> Iterator[bool]:
        for without in (1, 2):
            yield from (used and (micro.seed >> 2 * i) % 4 != without for i, used in enumerate(micro.uses))

    return [replace(micro, uses=tuple(halves(micro))) for micro in window]


def reference_of_pairs(windows: list[Window], world_size: int) -> list[list[torch.Tensor]]:
    """Compute in fp64 per window the gradients of each pair, summed over micro-batches and averaged over ranks."""

    def of_half(half: slice) -> list[list[torch.Tensor]]:
        parts = [[replace(micro, uses=micro.uses[half]) for micro in window] for window in windows]
        return reference([[micro for micro in window if any(micro.uses)] for window in parts], world_size)

    weights, vectors = of_half(slice(len(OUTS))), of_half(slice(len(OUTS), None))
    return [
        [gradient for weight, vector in zip(*window, strict=True) for gradient in (weight, vector[:, 0])]
        for window in zip(weights, vectors, strict=True)
    ]


def module_of(setup: Setup, model: Model) -> Pairs:
    import deepspeed

    if not model.sharded:
        return Pairs(setup.checkpointing, model.twice)
    with deepspeed.zero.Init(config_dict_or_path=setup.deepspeed_config(requestzero=False)):
        module = Pairs(setup.checkpointing, model.twice)
    with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
        for param in module.parameters():
            torch.nn.init.zeros_(param)
    return module


@dataclass
class Wrong:
    """Counts over all windows."""

    updates: int = 0
    norms: int = 0
    reads: int = 0
    """Sums that ``safe_get_full_grad`` gives before the step."""
    weights: int = 0
    """Weights of the module that are not their masters."""
    compared: int = 0


def wrong_windows(setup: Setup, windows: list[Window], model: Model = Model(), requestzero: bool = True) -> Wrong:
    """Train pairs over ``windows`` and compare with plain PyTorch, without tolerance but for the norm's last place."""
    import deepspeed.comm as dist

    expected = reference_of_pairs(windows, dist.get_world_size())
    found = Wrong()
    with fp16_where_needed(setup.model):
        engine = build(setup, requestzero, model=module_of(setup, model))
        try:
            before = masters(engine)
            for window, gradients in zip(windows, expected, strict=True):
                sums = [gradient * (2 if model.twice else 1) for gradient in gradients]
                before = _compare(engine, setup, window, sums, before, found)
        finally:
            engine.destroy()
    return found


def _compare(
    engine: Any,
    setup: Setup,
    window: Window,
    sums: list[torch.Tensor],
    before: list[torch.Tensor],
    found: Wrong,
) -> list[torch.Tensor]:
    from deepspeed.utils import safe_get_full_grad

    for micro in window:
        backward(engine, micro, mark=setup.managed)
    scale = float(engine.optimizer.loss_scale)
    read = [safe_get_full_grad(p).cpu().double() / scale for p in engine.module.parameters()]
    if setup.managed:
        engine.set_gradient_accumulation_boundary(True)
    engine.step()
    after = masters(engine)
    norm = torch.stack([gradient.square().sum() for gradient in sums]).sum().sqrt().item()
    found.reads += sum(not torch.equal(got, wanted) for got, wanted in zip(read, sums, strict=True))
    found.updates += sum(
        not torch.equal(got, wanted) for got, wanted in zip(difference(before, after), sums, strict=True)
    )
    found.norms += abs(float(engine.get_global_grad_norm()) - norm) > 1e-6 * norm
    found.weights += sum(
        not torch.equal(weight, master.to(weight.dtype))
        for weight, master in zip(whole_weights(engine), after, strict=True)
    )
    found.compared += len(sums)
    return after


def whole_weights(engine: Any) -> list[torch.Tensor]:
    """The module's own weights, on the CPU (collective)."""
    import deepspeed

    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params):
        return [param.detach().cpu().clone() for param in params]


def feed_whole(engine: Any, value: float, request_end: bool = True) -> None:
    """Run a micro-batch of a ``OneWeight`` whose gradient is ``value`` in every element, gathered or not."""
    weight = engine.module.weight
    engine.set_gradient_accumulation_boundary(request_end)
    engine.backward(engine(torch.full(tuple(weight.ds_shape), value, dtype=weight.dtype, device=engine.device)))


def change_of(engine: Any, before: list[torch.Tensor]) -> list[float]:
    """The first element of the gradient that one step has applied to every parameter (collective)."""
    return [gradient.flatten()[0].item() for gradient in difference(before, masters(engine))]
