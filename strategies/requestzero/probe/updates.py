"""Wrong parameter updates: the applied update against the window's exact sum."""

from __future__ import annotations

from typing import Any

import torch

from requestzero.probe.engines import built
from requestzero.probe.grid import Configuration, Engine
from requestzero.probe.windows import LR, ExactLayers, Micro, Window, reference, values, wrong_updates


def count_wrong_updates(configuration: Configuration, engine: Engine, windows: list[Window]) -> dict[str, int]:
    """Count ``updates`` (windows x layers) and ``wrong_updates``, of which a bit or more is wrong (collective).

    An update is the change of the fp32 master weights. With 16-bit masters, whose optimizer is Adam, it is the gradient
    that ``safe_get_full_grad`` reads before the step.
    """
    import deepspeed.comm as dist

    expected = reference(windows, dist.get_world_size())
    with built(configuration, engine, ExactLayers(), LR) as training:
        run = _applied if configuration.masters == "fp32" else _read
        applied = [run(training, window) for window in windows]
    return {"updates": sum(map(len, expected)), "wrong_updates": wrong_updates(applied, expected)}


def _applied(training: Any, window: Window) -> list[torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    def weights() -> list[torch.Tensor]:
        return [on_cpu(safe_get_full_fp32_param(p)).clone() for p in training.module.parameters()]

    before = weights()
    _accumulate(training, window)
    training.step()
    return [(b - a).double() / LR for b, a in zip(before, weights(), strict=True)]


def _read(training: Any, window: Window) -> list[torch.Tensor]:
    from deepspeed.utils import safe_get_full_grad

    _accumulate(training, window)
    sums = [on_cpu(safe_get_full_grad(p)).double() for p in training.module.parameters()]
    training.step()
    return sums


def on_cpu(value: torch.Tensor | None) -> torch.Tensor:
    """Return the value of a parameter on the CPU; DeepSpeed gives ``None`` for one that is not its optimizer's."""
    assert value is not None
    return value.detach().cpu()


def _accumulate(training: Any, window: Window) -> None:
    for micro in window:
        training.set_gradient_accumulation_boundary(micro.request_end)
        training.backward(_loss(training, micro))


def _loss(training: Any, micro: Micro) -> torch.Tensor:
    import deepspeed.comm as dist

    dtype = next(training.module.parameters()).dtype
    x, w = values(micro.seed, dist.get_rank(), dist.get_world_size())
    return training(x.to(training.device, dtype), w.to(training.device, dtype), micro.uses)
