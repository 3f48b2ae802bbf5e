"""Gradients that are set on parameters between backward and step: left out, and told once."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from support.engines import build
from support.grid import every_place
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import applied_by, assert_sums
from support.windows import ALL, Micro, backward


def set_before_steps(setup: Setup) -> list[tuple[str, str]]:
    """The warnings of three steps, the last one without a backward, and the files that they name."""
    engine: Any = build(setup)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for window in ([Micro(ALL, 1), Micro(ALL, 2)], [Micro(ALL, 3)], []):
            for micro in window:
                backward(engine, micro)
            for parameter in engine.module.parameters():
                parameter.grad = torch.ones_like(parameter)
            assert_sums(applied_by(engine), window)
            assert engine.was_step_applied() == bool(window)
    engine.destroy()
    return [(str(each.message), each.filename) for each in caught if "p.grad" in str(each.message)]


@every_place
def test_they_are_left_out_and_told(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    ((told, _),), nothing = two_ranks.run(set_before_steps, Setup(stage=stage, offload=offload))
    assert told.startswith("p.grad of 5 parameters was set between backward and step. It is left out")
    assert not nothing


def test_at_stage_3(two_ranks: RankGroup) -> None:
    ((told, _),), nothing = two_ranks.run(set_before_steps, Setup(stage=3))
    assert "was set between backward and step" in told
    assert not nothing
