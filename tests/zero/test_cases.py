"""Small windows with known gradients; DeepSpeed's own optimizer gives the wrong values that the file records."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.engines import build
from support.ranks import RankGroup
from support.recorded_windows import CASES, TwoLayers
from support.setup import Setup
from support.windows import LR

CONFIGURATIONS = {
    f"zero{stage} {'offload' if offload else 'device'} model={model} accumulate={accum}": Setup(
        stage=stage, offload=offload, model=model, accum=accum
    )
    for stage in (1, 2)
    for offload in (False, True)
    for model, accum in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"))
}


def play(setup: Setup, cases: list[dict[str, Any]], requestzero: bool) -> list[list[list[float]]]:
    """Per case and window the applied gradient of both layers (their entries are all equal)."""
    return [_play_case(build(setup, requestzero, TwoLayers()), case) for case in cases]


def _play_case(engine: Any, case: dict[str, Any]) -> list[list[float]]:
    import deepspeed.comm as dist

    dtype = next(engine.module.parameters()).dtype
    applied = []
    for window in case["windows"]:
        before = [p.detach().clone() for p in engine.module.parameters()]
        for micro in window:
            engine.set_gradient_accumulation_boundary(micro["request_end"])
            x = torch.full((1, 4), float(micro["value_by_rank"][dist.get_rank()]), dtype=dtype, device=engine.device)
            engine.backward(engine(x, micro["uses"]))
        engine.step()
        # bf16 weights hold these multiples of 1/16 exactly.
        change = [(b - p.detach()).double() / LR for b, p in zip(before, engine.module.parameters(), strict=True)]
        assert all(bool((c == c.flatten()[0]).all()) for c in change)
        applied.append([c.flatten()[0].item() for c in change])
    engine.destroy()
    return applied


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_case_is_exact(two_ranks: RankGroup, name: str) -> None:
    assert len(CASES) == 15
    for applied in two_ranks.run(play, CONFIGURATIONS[name], CASES, True):
        assert applied == [case["expected_gradient"] for case in CASES]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_stock_deepspeed_gives_the_recorded_wrong_values(two_ranks: RankGroup, name: str) -> None:
    """These cases can fail: without this package they give what the file says."""
    wrong = [case for case in CASES if name in case["stock_deepspeed_0_19_8_wrong"]]
    played = two_ranks.run(play, CONFIGURATIONS[name], wrong, False)[0] if wrong else []
    assert played == [case["stock_deepspeed_0_19_8_wrong"][name] for case in wrong]
    assert wrong or name.endswith("device model=bf16 accumulate=fp32")
