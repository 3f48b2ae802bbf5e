"""The all-gather of a group's updated weights begins before the next group steps, and is waited for at the end."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.engines import build, module_weights
from support.grid import every_place
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import assert_exact_window
from support.windows import ALL, Micro, backward

GROUPS = 3


class Gathers(TorchDispatchMode):
    """Logs all-gathers that begin."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func.overloadpacket) == "c10d._allgather_base_":
            self.log.append("gather")
        return func(*args, **(kwargs or {}))


def order_of_a_step(setup: Setup, requestzero: bool) -> tuple[list[str], bool]:
    """The order of steps and gathers in a step of several groups; true if the model has the new weights afterwards."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.utils import safe_get_full_fp32_param

    engine: Any = build(setup, requestzero)
    gathers, original = Gathers(), DeepSpeedZeroOptimizer._optimizer_step

    def step(self: Any, group_no: int) -> None:
        gathers.log.append(f"step {group_no}")
        original(self, group_no)

    backward(engine, Micro(ALL, 1))
    with patch.object(DeepSpeedZeroOptimizer, "_optimizer_step", step), gathers:
        engine.step()
    weights = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    dtype = next(engine.module.parameters()).dtype
    arrived = all(
        torch.equal(new.cpu().to(dtype).float(), now)
        for new, now in zip(weights, module_weights(engine), strict=True)
        if new is not None
    )
    engine.destroy()
    return gathers.log, arrived


@every_place
def test_a_group_is_gathered_beside_the_step_of_the_next(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    setup = Setup(stage, offload, "bf16", "fp32", groups=GROUPS)
    wanted = ["step 0", "gather", "step 1", "gather", "step 2", "gather"]
    assert two_ranks.run(order_of_a_step, setup, True) == [(wanted, True)] * 2


def test_stock_gathers_at_the_end(two_ranks: RankGroup) -> None:
    log, _ = two_ranks.run(order_of_a_step, Setup(2, model="bf16", groups=GROUPS), False)[0]
    assert log == ["step 0", "step 1", "step 2", "gather", "gather", "gather"]


class Refusing(RuntimeError):
    pass


def after_a_step_that_raised(setup: Setup) -> None:
    """An optimizer that fails on all ranks when its second group steps; the next window is exact."""
    engine: Any = build(setup)
    backward(engine, Micro(ALL, 1))
    step, calls = engine.optimizer.optimizer.step, []

    def fail(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Refusing
        step(*args, **kwargs)

    groups = engine.optimizer.optimizer.param_groups
    with patch.object(engine.optimizer.optimizer, "step", fail), pytest.raises(Refusing):
        engine.step()
    engine.optimizer.optimizer.param_groups = groups  # DeepSpeed puts them back only where the step returns
    engine.zero_grad()
    assert_exact_window(engine, [Micro(ALL, 2), Micro(ALL, 3)])
    engine.destroy()


def test_a_step_that_raised_leaves_no_gather_behind(two_ranks: RankGroup) -> None:
    two_ranks.run(after_a_step_that_raised, Setup(2, groups=GROUPS))
