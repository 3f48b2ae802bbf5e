"""What a boundary backward and a step cost against DeepSpeed's own optimizer, as counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting import Operators
from ranks import RankGroup
from windows import Fp16OnCpu, Setup, build


class Many(torch.nn.Module):
    checkpointing = "none"

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def costs(setup: Setup, requestzero: bool, tensors: int) -> dict[str, dict[str, int]]:
    """Counts of the second window's lone boundary backward and of its step."""
    engine: Any = build(setup, requestzero, model=Many(tensors))
    x = torch.ones(1, 8, dtype=next(engine.module.parameters()).dtype, device=engine.device)
    host = [p.grad for p in engine.optimizer.single_partition_of_fp32_groups if p.grad is not None]
    for _ in range(2):
        engine.set_gradient_accumulation_boundary(True)
        loss = engine(x)
        with Operators(host) as in_backward:
            engine.backward(loss)
        with Operators() as in_step:
            engine.step()
    engine.destroy()
    return {
        "backward": {
            "operators": in_backward.total,
            "reads": in_backward.host_reads,
            "host copies": in_backward.copies_into_destinations,
        },
        "step": {"operators": in_step.total, "reads": in_step.host_reads},
    }


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("model", "accum"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")])
def test_offload_costs_less_than_stock(two_ranks: RankGroup, stage: int, model: str, accum: str) -> None:
    setup = Setup(stage=stage, offload=True, model=model, accum=accum)
    ours = two_ranks.run(costs, setup, True, 64)[0]
    stock = two_ranks.run(costs, setup, False, 64)[0]
    assert ours["backward"]["operators"] < stock["backward"]["operators"]
    assert ours["step"]["operators"] < stock["step"]["operators"]
    reads = 0 if model == "fp32" else 1  # nothing is checked in fp32
    assert (ours["backward"]["reads"], ours["step"]["reads"]) == (0, reads)
    assert stock["backward"]["reads"] == 32
    copies = 1 if (model, accum) == ("bf16", "fp32") else 32  # one per partition, or one per owned parameter
    assert ours["backward"]["host copies"] == copies
    assert stock["backward"]["host copies"] == 32
    print(setup, "ours", ours, "stock", stock)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("model", ["fp32", "bf16"])
def test_device_costs_no_more_than_stock(two_ranks: RankGroup, stage: int, model: str) -> None:
    setup = Setup(stage=stage, model=model, accum=model)
    ours = two_ranks.run(costs, setup, True, 64)[0]
    stock = two_ranks.run(costs, setup, False, 64)[0]
    for part in ("backward", "step"):
        assert ours[part]["operators"] <= stock[part]["operators"]
    reads = 0 if model == "fp32" else 1  # nothing is checked in fp32
    assert (ours["backward"]["reads"], ours["step"]["reads"]) == (0, reads)
    print(setup, "ours", ours, "stock", stock)


def operators_of_step(setup: Setup, divisor: float) -> list[tuple[int, int]]:
    """Operators and host reads of the steps of three windows."""
    seen = []
    with Fp16OnCpu():
        engine: Any = build(setup, model=Many(8))
        x = torch.ones(1, 8, dtype=next(engine.module.parameters()).dtype, device=engine.device)
        for _ in range(3):
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(x))
            with Operators() as operators:
                engine.step(divisor=divisor)
            seen.append((operators.total, operators.host_reads))
        engine.destroy()
    return seen


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("model", ["bf16", "fp16"])
def test_a_divisor_costs_nothing_where_the_step_divides_anyway(
    two_ranks: RankGroup, stage: int, offload: bool, model: str
) -> None:
    """With clipping (bf16) or a loss scale (fp16) the divisor is part of that division: not one operator more."""
    config: dict[str, Any] = {
        "bf16": {"gradient_clipping": 1e-6},
        "fp16": {"fp16": {"enabled": True, "loss_scale": 16.0}},
    }
    setup = Setup(stage=stage, offload=offload, model=model, accum="fp32", config=config[model])
    without, with_divisor = (two_ranks.run(operators_of_step, setup, divisor)[0] for divisor in (1.0, 3.0))
    assert with_divisor == without
