"""Overflow options in every front end: each key reaches the engine, contradictions have the same message."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from requestzero.config.options import OverflowSettings
from support.overflow_front_ends import FRONT_ENDS, Effective, refusal, through
from support.ranks import RankGroup
from support.setup import Setup

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


def cases_of(front_end: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Trainer has divided the losses before a request could be dropped."""
    if front_end != "Trainer":
        return CASES
    return {**CASES, "static": ("fp16", {"loss_scale": 8, "on_overflow": "raise"})}


@pytest.fixture(scope="module", params=FRONT_ENDS)
def front_end(request: pytest.FixtureRequest, two_ranks: RankGroup) -> tuple[str, list[dict[str, Effective]]]:
    """A front end, and the options that the engines of both ranks use in every case."""
    return request.param, two_ranks.run(through, request.param, cases_of(request.param))


@pytest.mark.parametrize("key", [item.name for item in fields(OverflowSettings)])
def test_every_key_reaches_the_engine(front_end: tuple[str, list[dict[str, Effective]]], key: str) -> None:
    name, on_ranks = front_end
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


def refusals(front_end: str) -> list[str]:
    return [refusal(front_end, options, precision) for options, precision in DISAGREEING]


def typed(options: dict[str, Any]) -> dict[str, Any]:
    """As Hydra's schema has them: some are numbers with a fraction."""
    numbers = ("loss_scale", "min_loss_scale")
    return {name: float(value) if name in numbers else value for name, value in options.items()}


DROPPING = {"on_overflow": "drop_request"}
TRAINER = "overflow.on_overflow='drop_request' is not possible where the losses are divided before the backward"


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_contradictions_are_told_alike(two_ranks: RankGroup, name: str) -> None:
    for messages in two_ranks.run(refusals, name):
        for text, (options, precision) in zip(messages, DISAGREEING, strict=True):
            if name == "Trainer" and options == DROPPING:
                assert text.startswith(TRAINER)
            else:
                wanted = OverflowSettings.contradictions(typed(options) if name == "Hydra" else options, precision)
                assert text.splitlines() == wanted, options


# --- schedulers given to initialize ---------------------------------------------------------------------------------

SCHEDULERS: dict[str, dict[str, Any]] = {
    "object": {},
    "config": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 9, "warmup_type": "linear"}},
}
POISONED = {1, 4, 5, 9}
"""Requests, two to a window, that bring a NaN: the third window has nothing else."""


def scheduled(kind: str, poisoned: set[int], first: int, folder: str, load: bool) -> list[tuple[Any, ...]]:
    """Windows ``first`` to 5 under ``drop_request``: rates and counters after each. Saves after the third."""
    import requestzero

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    config = Setup(config={"overflow": {"check_grad_overflow": True, "on_overflow": "drop_request"}}).deepspeed_config()
    scheduler = None
    if kind == "config":
        config["scheduler"] = SCHEDULERS[kind]
    else:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5**update)
    engine = requestzero.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]
    if load:
        engine.load_checkpoint(folder)
    seen: list[tuple[Any, ...]] = []
    for request in range(2 * first, 12):
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(torch.full((1, 4), float("nan") if request in poisoned else 1.0)).sum())
        if request % 2:
            engine.step()
            counts = engine.attempted_updates, engine.applied_updates, engine.skipped_updates, engine.dropped_requests
            seen.append((engine.get_lr()[0], *counts, model.weight.tolist()))
            if request == 5 and not load:
                engine.save_checkpoint(folder)
    engine.destroy()
    return seen


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_move_on_applied_updates_only(two_ranks: RankGroup, tmp_path: Path, kind: str) -> None:
    clean = two_ranks.run(scheduled, kind, set(), 0, str(tmp_path / "clean"), False)
    whole = two_ranks.run(scheduled, kind, POISONED, 0, str(tmp_path / "state"), False)
    resumed = two_ranks.run(scheduled, kind, POISONED, 3, str(tmp_path / "state"), True)
    for expected, want, got in zip(clean, whole, resumed, strict=True):
        assert len({row[0] for row in expected}) == 6
        assert [row[0] for row in want] == [expected[i][0] for i in (0, 1, 1, 2, 3, 4)]
        assert [row[1:5] for row in want] == [
            (1, 1, 0, 1), (2, 2, 0, 1), (3, 2, 1, 3), (4, 3, 1, 3), (5, 4, 1, 4), (6, 5, 1, 4)
        ]  # fmt: skip
        assert got == want[3:]
