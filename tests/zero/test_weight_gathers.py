"""The all-gather of a group's updated weights begins before the next group steps, and is waited for at the end."""

from __future__ import annotations

import time
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

    engine: Any = build(setup, requestzero)
    gathers, original = Gathers(), DeepSpeedZeroOptimizer._optimizer_step

    def step(self: Any, group_no: int) -> None:
        gathers.log.append(f"step {group_no}")
        original(self, group_no)

    backward(engine, Micro(ALL, 1))
    with patch.object(DeepSpeedZeroOptimizer, "_optimizer_step", step), gathers:
        engine.step()
    arrived = has_new_weights(engine)
    engine.destroy()
    return gathers.log, arrived


def has_new_weights(engine: Any) -> bool:
    """Return true if the model's weights are those of the masters, of which this rank has a part."""
    from deepspeed.utils import safe_get_full_fp32_param

    weights = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    dtype = next(engine.module.parameters()).dtype
    return all(
        torch.equal(new.cpu().to(dtype).float(), now)
        for new, now in zip(weights, module_weights(engine), strict=True)
        if new is not None
    )


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


def fail_in_the_second_group(engine: Any, late: float = 0.0) -> None:
    """Step with an optimizer that raises when its second group steps; the last rank is ``late`` by so many seconds."""
    optimizer, calls = engine.optimizer.optimizer, []
    step, groups = optimizer.step, optimizer.param_groups

    def fail(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Refusing
        time.sleep(late * (torch.distributed.get_rank() == torch.distributed.get_world_size() - 1))
        step(*args, **kwargs)

    with patch.object(optimizer, "step", fail), pytest.raises(Refusing):
        engine.step()
    optimizer.param_groups = groups  # DeepSpeed puts them back only where the step returns


def after_a_step_that_raised(setup: Setup) -> None:
    engine: Any = build(setup)
    backward(engine, Micro(ALL, 1))
    fail_in_the_second_group(engine)
    engine.zero_grad()
    assert_exact_window(engine, [Micro(ALL, 2), Micro(ALL, 3)])
    engine.destroy()


def test_the_window_after_a_step_that_raised_is_exact(two_ranks: RankGroup) -> None:
    two_ranks.run(after_a_step_that_raised, Setup(2, groups=GROUPS))


def written_after_a_step_that_raised(setup: Setup) -> bool:
    """True if weights that are written after the step stay what they are, also once slower ranks have come."""
    engine: Any = build(setup)
    backward(engine, Micro(ALL, 1))
    fail_in_the_second_group(engine, late=0.3)
    with torch.no_grad():
        for param in engine.module.parameters():
            param.fill_(8.0)
    torch.distributed.barrier()
    time.sleep(0.2)
    kept = all(bool((param == 8.0).all()) for param in engine.module.parameters())
    engine.destroy()
    return kept


def test_nothing_comes_into_the_weights_after_a_step_that_raised(two_ranks: RankGroup) -> None:
    setup = Setup(2, groups=GROUPS, config={"requestzero": {"rank_agreement": False}})
    assert two_ranks.run(written_after_a_step_that_raised, setup) == [True, True]


def step_of_another_engine(setup: Setup) -> tuple[bool, bool]:
    """True for each of two engines if its model has the new weights, the second's step being within the first's."""
    first, second = build(setup), build(setup, requestzero=False)
    for engine in (first, second):
        backward(engine, Micro(ALL, 1))
    step, calls = first.optimizer.optimizer.step, []

    def step_both(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            second.step()
        step(*args, **kwargs)

    with patch.object(first.optimizer.optimizer, "step", step_both):
        first.step()
    arrived = tuple(has_new_weights(engine) for engine in (first, second))
    for engine in (first, second):
        engine.destroy()
    return arrived  # type: ignore[return-value]


def test_another_engine_gathers_its_own_weights(two_ranks: RankGroup) -> None:
    assert two_ranks.run(step_of_another_engine, Setup(2, model="bf16", groups=GROUPS)) == [(True, True)] * 2
