"""Parameters that model and pipeline parallelism replicate are counted once in the norm, by DeepSpeed's rules."""

from __future__ import annotations

from math import hypot
from typing import Any

import pytest

from support.engines import build
from support.grid import every_place
from support.ranks import RankGroup
from support.releases import is_deepspeed_since
from support.setup import Setup
from support.windows import OUTS, Micro, backward, reference

MICRO = Micro((True,) * len(OUTS), 7)
REPLICATED, PARALLEL = 1, 3
"""Layers: one that other pipeline stages hold as well, and one that model parallelism splits."""


def norm(setup: Setup, model_parallel_rank: int, requestzero: bool) -> tuple[float, int]:
    """The norm of one window, and the host reads of its step."""
    from requestzero.probe.counters import Operators

    engine: Any = build(setup, requestzero)
    params = list(engine.module.parameters())
    params[REPLICATED].ds_pipe_replicated = True
    params[PARALLEL].model_parallel = True
    engine.optimizer.model_parallel_rank = model_parallel_rank  # as a model-parallel unit would have it
    backward(engine, MICRO)
    with Operators() as in_step:
        engine.step()
    result = float(engine.get_global_grad_norm()), in_step.host_reads
    engine.destroy()
    return result


@every_place
@pytest.mark.parametrize("accum", ["bf16", "fp32"])
@pytest.mark.parametrize("model_parallel_rank", [0, 1])
def test_replicated_parameters_are_counted_once(
    two_ranks: RankGroup, stage: int, offload: bool, accum: str, model_parallel_rank: int
) -> None:
    setup = Setup(stage=stage, offload=offload, model="bf16", accum=accum)
    norms = [float(grad.norm()) for grad in reference([[MICRO]], 2)[0]]
    counted = [n for i, n in enumerate(norms) if i == PARALLEL or (i != REPLICATED and model_parallel_rank == 0)]
    ours, reads = two_ranks.run(norm, setup, model_parallel_rank, True)[0]
    assert ours == pytest.approx(hypot(*counted), rel=1e-6)
    assert ours != pytest.approx(hypot(*norms), rel=1e-3), "counting all of them would be seen"
    assert reads == 1
    # Stock's is BF16_Optimizer there; an older one counts more.
    if ((stage, accum) != (1, "fp32") or offload) and is_deepspeed_since("0.19.8"):
        assert two_ranks.run(norm, setup, model_parallel_rank, False)[0][0] == pytest.approx(ours, rel=1e-6)
