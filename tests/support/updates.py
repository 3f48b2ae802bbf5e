"""Updates of the exact layers, compared with plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from support.engines import build, masters, module_weights
from support.fp16 import fp16_where_needed
from support.setup import Setup
from support.windows import LR, Micro, Window, backward, reference


def difference(before: list[torch.Tensor], after: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradient of every layer that plain SGD has applied between the two, in fp64."""
    return [(b - a).double() / LR for b, a in zip(before, after, strict=True)]


def applied_by(engine: Any, **step: Any) -> list[torch.Tensor]:
    """Step; the gradient of every layer that the step has applied."""
    before = masters(engine)
    engine.step(**step)
    return difference(before, masters(engine))


def assert_sums(applied: list[torch.Tensor], micros: list[Micro], divisor: float = 1.0) -> None:
    """Without tolerance: the sum of these micro-batches, averaged over ranks, divided by ``divisor``."""
    import deepspeed.comm as dist

    expected = reference([micros], dist.get_world_size())[0] if micros else [torch.zeros_like(a) for a in applied]
    for got, wanted in zip(applied, expected, strict=True):
        assert torch.equal(got, wanted / divisor), (got, wanted / divisor)


def assert_exact_window(engine: Any, micros: list[Micro]) -> None:
    """Run these micro-batches, the last of which ends its request, and step: exactly their sum is applied."""
    for micro in micros:
        backward(engine, micro)
    assert_sums(applied_by(engine), micros)


def run_windows(setup: Setup, windows: list[Window], requestzero: bool = True) -> list[list[torch.Tensor]]:
    """Train over ``windows`` on this rank; for each the applied gradient of every layer."""
    # Stock reads another parameter's master weights under round_robin_gradients; the module's are in parts at stage 3.
    weights = masters if requestzero or setup.stage == 3 else module_weights
    with fp16_where_needed(setup.model):
        engine = build(setup, requestzero)
        applied = []
        try:
            after = weights(engine)
            for window in windows:
                before = after
                for micro in window:
                    backward(engine, micro, mark=setup.managed)
                if setup.managed:
                    engine.set_gradient_accumulation_boundary(True)
                engine.step()
                after = weights(engine)
                applied.append(difference(before, after))
        finally:
            engine.destroy()
    return applied
