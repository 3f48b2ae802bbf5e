"""The overflow options through every door: each key reaches the engine, contradictions are told in the same words."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from overflow_doors import DOORS, Effective, refusal, through
from ranks import RankGroup

from requestzero.overflow_rules import contradictions
from requestzero.settings import OverflowSettings

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": (
        "fp16",
        {
            "loss_scale": 0,
            "initial_scale_power": 5,
            "loss_scale_window": 7,
            "hysteresis": 3,
            "consecutive_hysteresis": True,
            "min_loss_scale": 2,
            "max_consecutive_skips": 4,
        },
    ),
    "static": ("fp16", {"loss_scale": 8, "on_overflow": "drop_request"}),
    "bf16 off": ("bf16", {"check_grad_overflow": False}),
    "bf16 raise": ("bf16", {"check_grad_overflow": True, "on_overflow": "raise"}),
    "bf16": ("bf16", {}),
    "fp32 on": ("fp32", {"check_grad_overflow": True, "on_overflow": "skip", "max_consecutive_skips": 2}),
    "fp32": ("fp32", {}),
}
# Option -> the case to look at, and the loss scaler's field and value there.
SCALER: dict[str, tuple[str, str, Any]] = {
    "loss_scale": ("static", "cur_scale", 8),
    "initial_scale_power": ("dynamic", "cur_scale", 32),
    "loss_scale_window": ("dynamic", "scale_window", 7),
    "hysteresis": ("dynamic", "delayed_shift", 3),
    "consecutive_hysteresis": ("dynamic", "consecutive_hysteresis", True),
    "min_loss_scale": ("dynamic", "min_scale", 2),
}


def cases_of(door: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Trainer has divided the losses before a request could be dropped."""
    if door != "Trainer":
        return CASES
    return {**CASES, "static": ("fp16", {"loss_scale": 8, "on_overflow": "raise"})}


@pytest.fixture(scope="module", params=DOORS)
def door(request: pytest.FixtureRequest, two_ranks: RankGroup) -> tuple[str, list[dict[str, Effective]]]:
    """A door, and what the engines of both ranks go by in every case."""
    return request.param, two_ranks.run(through, request.param, cases_of(request.param))


@pytest.mark.parametrize("key", [item.name for item in fields(OverflowSettings)])
def test_every_key_reaches_the_engine(door: tuple[str, list[dict[str, Effective]]], key: str) -> None:
    name, on_ranks = door
    cases = cases_of(name)
    assert any(key in options for _, options in cases.values())
    for found in on_ranks:
        for case, (precision, options) in cases.items():
            wanted = OverflowSettings(**options).resolved(precision)
            assert getattr(found[case]["options"], key) == getattr(wanted, key), case
            if key == "check_grad_overflow":
                assert found[case]["check"] is wanted.check_grad_overflow, case
        if key in SCALER:
            case, field, value = SCALER[key]
            assert found[case]["scaler"][field] == value
            assert found["static"]["scaler"]["dynamic"] is False
            assert found["dynamic"]["scaler"]["dynamic"] is True


DISAGREEING: list[tuple[dict[str, Any], str]] = [
    ({"loss_scale": 8}, "bf16"),
    ({"hysteresis": 2, "max_consecutive_skips": 3}, "fp32"),
    ({"on_overflow": "drop_request"}, "fp32"),
    ({"on_overflow": "drop_request", "check_grad_overflow": False}, "bf16"),
    ({"loss_scale": 8, "loss_scale_window": 7}, "fp16"),
    ({"on_overflow": "drop_request"}, "fp16"),
    ({"on_overflow": "raise", "max_consecutive_skips": 3}, "bf16"),
    ({"min_loss_scale": 2**17}, "fp16"),
]


def refusals(door: str) -> list[str]:
    return [refusal(door, options, precision) for options, precision in DISAGREEING]


DROPPING = {"on_overflow": "drop_request"}
TRAINER = "overflow.on_overflow='drop_request' is not possible where the losses are divided before the backward"


@pytest.mark.parametrize("name", DOORS)
def test_contradictions_are_told_alike(two_ranks: RankGroup, name: str) -> None:
    for told in two_ranks.run(refusals, name):
        for text, (options, precision) in zip(told, DISAGREEING, strict=True):
            if name == "Trainer" and options == DROPPING:
                assert text.startswith(TRAINER)
            else:
                assert text.splitlines() == contradictions(options, precision), options
