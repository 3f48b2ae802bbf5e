"""A destroyed engine is freed, with its model: a process may build many, as a hyperparameter search does."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from support.engines import build
from support.ranks import RankGroup
from support.setup import Setup
from support.windows import ALL, Micro, backward


def left_over(setup: Setup, requestzero: bool) -> list[str]:
    """The classes of what is left of an engine that has trained and is destroyed."""
    engine: Any = build(setup, requestzero)
    for _ in range(2):  # from the second on, the order of modules is known
        backward(engine, Micro(ALL, 1))
        engine.step()
    objects = [weakref.ref(each) for each in (engine, engine.optimizer, engine.module, *engine.module.parameters())]
    engine.destroy()
    del engine
    gc.collect()
    return [type(each()).__name__ for each in objects if each() is not None]


@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_is_left(two_ranks: RankGroup, stage: int) -> None:
    assert two_ranks.run(left_over, Setup(stage), True) == [[], []]


def test_stock_keeps_its_engine(two_ranks: RankGroup) -> None:
    for left in two_ranks.run(left_over, Setup(3), False):
        assert {"DeepSpeedEngine", "DeepSpeedZeroOptimizer_Stage3", "Parameter"} <= set(left)


def used_after_another(setup: Setup) -> list[float]:
    """An engine goes on exactly after another one was destroyed beside it."""
    from support.updates import assert_exact_window

    engine, other = build(setup), build(setup)
    for each in (engine, other):
        assert_exact_window(each, [Micro(ALL, 1), Micro(ALL, 2)])
    other.destroy()
    assert_exact_window(engine, [Micro(ALL, 3)])
    engine.destroy()
    return []


def test_other_engines_go_on(two_ranks: RankGroup) -> None:
    two_ranks.run(used_after_another, Setup(3))
