"""The doctor's result for a config is what DeepSpeed's own optimizers do: no loss more, and none less."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from requestzero.doctor.stock_losses import Loss, stock_run
from support.ranks import RankGroup
from support.recorded_windows import TwoLayers
from support.releases import needs_deepspeed
from support.setup import Setup
from support.windows import LR

BOTH, ONLY_A = (1, 1), (1, 0)


def micro(value: float, uses: tuple[int, int], request_end: bool) -> tuple[float, tuple[int, int], bool]:
    return value, uses, request_end


# Layers a and b; what a micro-batch adds to the gradient's mean over two ranks, the layers it uses, whether it ends
# its request.
WINDOWS = [
    [micro(1, BOTH, True), micro(2, BOTH, True), micro(4, BOTH, True)],
    [micro(1, ONLY_A, False), micro(2, BOTH, True)],
    [micro(1, ONLY_A, True), micro(2, BOTH, True)],
    [micro(4, BOTH, True)],
    [micro(1, BOTH, False), micro(2, ONLY_A, True)],
    [micro(8, BOTH, True)],
    [micro(1, ONLY_A, True)],
    [micro(1, BOTH, False), micro(2, BOTH, True)],
]
A, B = 0, 1
# Where a loss shows: (window, layer, exact gradient).
SEVERAL, LATE_IN_REQUEST, LATE_REQUEST, ABSENT_AT_END, ABSENT, ONE_REQUEST = (
    (0, A, 7.0),
    (1, B, 2.0),
    (2, B, 2.0),
    (4, B, 1.0),
    (6, B, 0.0),
    (7, A, 3.0),
)
# What each loss makes of it; None: it depends on the configuration.
SHOWS = {
    Loss.EARLIER_REQUESTS: {SEVERAL: 4.0},
    Loss.FIRST_REQUEST: {SEVERAL: 6.0},
    Loss.FIRST_BACKWARD: {SEVERAL: 6.0},
    Loss.LATE_AFTER_FIRST_REQUEST: {LATE_REQUEST: 8.0},
    # 2 and what b has summed: 6 or 7 in the first window, and then what it summed in the second one.
    Loss.LATE_AFTER_FIRST_BACKWARD: {LATE_IN_REQUEST: None, LATE_REQUEST: None},
    Loss.ABSENT_AT_REQUEST_END: {ABSENT_AT_END: 4.0},
    Loss.UNREDUCED: {ABSENT_AT_END: None},
    Loss.ABSENT_FROM_WINDOW: {ABSENT: 8.0},
}
OTHERS = {
    Loss.DISCARDED_SUM,
    Loss.FIRST_OF_TWO_FORWARDS,
    Loss.USED_TWICE,
    Loss.EDITED_SUM,
    Loss.SKIPPED_AGAIN,
    Loss.INF_APPLIED,
    Loss.RAISED_SCALE,
}
"""Not of such windows: see ``test_stock_losses_stage_3.py``."""
CHECKED = (SEVERAL, LATE_IN_REQUEST, LATE_REQUEST, ABSENT_AT_END, ABSENT, ONE_REQUEST)


def config_of(stage: int, offload: bool, model: str, accum: str, managed: bool, **zero: Any) -> dict[str, Any]:
    return Setup(stage, offload, model, accum, managed=managed, zero=zero).deepspeed_config()


GRID = {
    f"zero{stage} {'offload' if offload else 'device'} {model}/{accumulation} managed={managed}": config_of(
        stage, offload, model, accumulation, managed
    )
    for stage, offload, (model, accumulation), managed in product(
        (1, 2), (False, True), (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")), (True, False)
    )
}
GRID |= {
    f"zero{stage} {'offload' if offload else 'device'} {dtypes} overlap_comm": config_of(
        stage, offload, *dtypes.split("/"), True, overlap_comm=True
    )
    for stage, offload, dtypes in product((1, 2), (False, True), ("fp32/fp32", "bf16/fp32"))
}
GRID |= {f"zero0 managed={managed}": config_of(0, False, "bf16", "bf16", managed) for managed in (True, False)}
GRID |= {
    f"zero3 {'offload' if offload else 'device'} {dtypes} managed={managed}": config_of(
        3, offload, *dtypes.split("/"), managed
    )
    for offload, dtypes, managed in product((False, True), ("bf16/bf16", "bf16/fp32", "fp32/fp32"), (True, False))
}
GRID["zero3 both"] = config_of(3, True, "bf16", "bf16", True, offload_param={"device": "cpu"})


def stock_gradients(config: dict[str, Any]) -> list[list[float]]:
    """Per window the gradient that DeepSpeed's own optimizer applies to both layers (their entries are all equal)."""
    import deepspeed
    import deepspeed.comm as dist

    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    applied, before = [], weights(engine)
    for window in WINDOWS:
        for value, uses, request_end in window:
            if config["managed_gradient_accumulation"]:
                engine.set_gradient_accumulation_boundary(request_end)
            by_rank = (2 * value, 0)[dist.get_rank()]
            x = torch.full((1, 4), float(by_rank), dtype=before[0].dtype, device=engine.device)
            engine.backward(engine(x, uses))
        engine.step()
        after = weights(engine)
        applied.append([((b - a).float() / LR).flatten()[0].item() for b, a in zip(before, after, strict=True)])
        before = after
    engine.destroy()
    return applied


def weights(engine: Any) -> list[torch.Tensor]:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    parameters = list(engine.module.parameters())
    with GatheredParameters(parameters, enabled=engine.zero_optimization_stage() == 3):
        return [parameter.detach().clone() for parameter in parameters]


@needs_deepspeed("the doctor speaks of its optimizer")
@pytest.mark.parametrize("name", GRID)
def test_the_result_is_what_deepspeed_does(two_ranks: RankGroup, name: str) -> None:
    losses = set(stock_run(GRID[name]).losses)
    for applied in two_ranks.run(stock_gradients, GRID[name]):
        wrong = {spot: applied[spot[0]][spot[1]] for spot in CHECKED if applied[spot[0]][spot[1]] != spot[2]}
        predicted = {spot for loss in losses - OTHERS for spot in SHOWS[loss]}
        assert set(wrong) == predicted, wrong
        for loss in losses - OTHERS:
            assert all(value in (None, wrong[spot]) for spot, value in SHOWS[loss].items()), (loss, wrong)


def test_every_loss_occurs_in_the_grid() -> None:
    found = {loss for config in GRID.values() for loss in stock_run(config).losses}
    assert found >= set(SHOWS) == set(Loss) - OTHERS
