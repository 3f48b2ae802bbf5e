"""A destroyed engine is freed, with its model: a process may build many, as a hyperparameter search does."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from support.engines import build
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import assert_exact_window
from support.windows import ALL, Micro, backward


class Interrupted(Exception):
    pass


def fail(*_: Any) -> None:
    raise Interrupted


def left_over(setup: Setup, requestzero: bool, interrupted: bool = False) -> list[str]:
    """The classes of what is left of an engine that has trained and is destroyed.

    Args:
        setup: of the engine.
        requestzero: whether it is ours.
        interrupted: whether its last forward ends in an exception, within a layer.
    """
    engine: Any = build(setup, requestzero)
    for _ in range(2):  # from the second on, the order of modules is known
        backward(engine, Micro(ALL, 1))
        engine.step()
    if interrupted:
        list(engine.module.modules())[-1].register_forward_pre_hook(fail)
        with pytest.raises(Interrupted):
            backward(engine, Micro(ALL, 1))
    objects = [weakref.ref(each) for each in (engine, engine.optimizer, engine.module, *engine.module.parameters())]
    engine.destroy()
    del engine
    gc.collect()
    return [type(each()).__name__ for each in objects if each() is not None]


@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_is_left(two_ranks: RankGroup, stage: int) -> None:
    assert two_ranks.run(left_over, Setup(stage), True) == [[], []]


def test_nothing_is_left_after_a_forward_that_raised(two_ranks: RankGroup) -> None:
    assert two_ranks.run(left_over, Setup(3), True, True) == [[], []]


def test_stock_keeps_its_engine(two_ranks: RankGroup) -> None:
    for left in two_ranks.run(left_over, Setup(3), False):
        assert {"DeepSpeedEngine", "DeepSpeedZeroOptimizer_Stage3", "Parameter"} <= set(left)


def trained_beside_another(setup: Setup) -> None:
    """An engine goes on exactly, with what it has remembered, after another one was destroyed beside it."""
    engine, other = build(setup), build(setup)
    for each in (engine, other):
        assert_exact_window(each, [Micro(ALL, 1), Micro(ALL, 2)])
        assert_exact_window(each, [Micro(ALL, 1)])
    remembered = released_by(engine).cache_info()
    assert remembered.currsize > 0
    other.destroy()
    assert released_by(engine).cache_info() == remembered
    assert_exact_window(engine, [Micro(ALL, 3)])
    engine.destroy()


def released_by(engine: Any) -> Any:
    """The cache of what a module releases."""
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    return coordinator._PartitionedParameterCoordinator__params_to_release


def test_other_engines_go_on(two_ranks: RankGroup) -> None:
    two_ranks.run(trained_beside_another, Setup(3))


def engines_of_one_module(setup: Setup) -> list[int]:
    """How often DeepSpeed's list has a module: with an engine, with two, with the second, which goes on exactly, and
    with none."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    first: Any = build(setup)
    counts = [FWD_MODULE_STACK.count(first.module)]
    second: Any = build(setup, model=first.module)
    counts.append(FWD_MODULE_STACK.count(first.module))
    for _ in range(2):
        first.destroy()
    counts.append(FWD_MODULE_STACK.count(second.module))
    assert_exact_window(second, [Micro(ALL, 1), Micro(ALL, 2)])
    second.destroy()
    return [*counts, FWD_MODULE_STACK.count(second.module)]


def test_a_module_of_two_engines_stays_with_the_other(two_ranks: RankGroup) -> None:
    assert two_ranks.run(engines_of_one_module, Setup(3)) == [[1, 2, 1, 0]] * 2
