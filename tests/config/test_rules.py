"""Overflow options that contradict each other: the message is the same for every front end."""

from __future__ import annotations

from typing import Any

import pytest

from requestzero.config.option_record import options_of
from requestzero.config.options import OverflowSettings

contradictions = OverflowSettings.contradictions

# Options, precision, and what the one problem says.
DISAGREEING: list[tuple[dict[str, Any], str | None, str]] = [
    (
        {"loss_scale": 8},
        "bf16",
        "overflow.loss_scale=8 (fp16.loss_scale) scales fp16 losses, but the precision is bf16: leave it out, or train "
        "in fp16.",
    ),
    (
        {"hysteresis": 2, "loss_scale_window": 9},
        "fp32",
        "overflow.loss_scale_window=9 (fp16.loss_scale_window), overflow.hysteresis=2 (fp16.hysteresis) scale fp16 "
        "losses, but the precision is fp32: leave them out, or train in fp16.",
    ),
    (
        {"loss_scale": 128, "hysteresis": 2},
        None,
        "overflow.loss_scale=128 (fp16.loss_scale) is a static loss scale, but overflow.hysteresis=2 (fp16.hysteresis) "
        "is for dynamic loss scaling: leave it out, or set overflow.loss_scale=0.",
    ),
    (
        {"check_grad_overflow": False},
        "fp16",
        "overflow.check_grad_overflow=False (bf16.check_grad_overflow) is not possible in fp16, whose loss scaling "
        "needs the check: leave it out, or train in bf16.",
    ),
    (
        {"check_grad_overflow": False, "on_overflow": "drop_request"},
        None,
        "overflow.on_overflow='drop_request' and overflow.check_grad_overflow=False (bf16.check_grad_overflow) "
        "disagree: without the check no overflow is seen. Turn it on, or leave the other out.",
    ),
    (
        {"max_consecutive_skips": 3},
        "fp32",
        "overflow.max_consecutive_skips=3 needs overflow.check_grad_overflow=true, which is off by default in fp32: "
        "turn it on, or leave both out.",
    ),
    (
        {"max_consecutive_skips": 3, "on_overflow": "raise"},
        None,
        "overflow.max_consecutive_skips=3 and overflow.on_overflow='raise' disagree: no update is skipped where the "
        "first one raises. Leave one of them out.",
    ),
    (
        {"on_overflow": "drop_request"},
        "fp16",
        "overflow.on_overflow='drop_request' and a dynamic loss scale (fp16.loss_scale=0, the default) disagree: an "
        "overflow says there that the scale is too large for all requests. Set a static overflow.loss_scale "
        "(fp16.loss_scale), or use 'skip'.",
    ),
    (
        {"min_loss_scale": 32, "initial_scale_power": 4},
        None,
        "overflow.min_loss_scale=32 (fp16.min_loss_scale) is above the first loss scale, 16 "
        "(overflow.initial_scale_power=4): lower the one or raise the other.",
    ),
    (
        {"min_loss_scale": 2**17},
        "fp16",
        "overflow.min_loss_scale=131072 (fp16.min_loss_scale) is above the first loss scale, 65536 "
        "(overflow.initial_scale_power=16, the default): lower the one or raise the other.",
    ),
    (
        {"consecutive_hysteresis": True, "hysteresis": 1},
        None,
        "overflow.consecutive_hysteresis=True (fp16.consecutive_hysteresis) and overflow.hysteresis=1 "
        "(fp16.hysteresis) disagree: a hysteresis of 1 tolerates no overflow, so nothing can be refilled. Leave one of "
        "them out.",
    ),
    (
        {"max_consecutive_skips": 2},
        "fp16",
        "overflow.max_consecutive_skips=2 and overflow.hysteresis=2 (fp16.hysteresis, the default) disagree: the run "
        "would stop before a smaller loss scale has been tried. Allow at least 3 skips, or lower the hysteresis.",
    ),
]


@pytest.mark.parametrize(("given", "precision", "text"), DISAGREEING)
def test_one_contradiction(given: dict[str, Any], precision: str | None, text: str) -> None:
    assert contradictions(given, precision) == [text]


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        ({}, None),
        ({name: None for name in options_of(OverflowSettings)}, "fp32"),
        ({"check_grad_overflow": False, "on_overflow": "skip"}, "bf16"),
        ({"check_grad_overflow": True, "on_overflow": "drop_request", "max_consecutive_skips": 1}, "fp32"),
        ({"on_overflow": "raise"}, "bf16"),
        ({"on_overflow": "drop_request"}, None),  # bf16, perhaps
        ({"max_consecutive_skips": 1}, None),
        ({"max_consecutive_skips": 1, "loss_scale": 8, "on_overflow": "drop_request"}, "fp16"),
        ({"max_consecutive_skips": 2, "hysteresis": 1, "loss_scale": 0}, "fp16"),
        ({"consecutive_hysteresis": True, "min_loss_scale": 2**16}, "fp16"),
    ],
)
def test_what_is_no_contradiction(given: dict[str, Any], precision: str | None) -> None:
    assert contradictions(given, precision) == []


def test_all_contradictions_at_once() -> None:
    given = {"check_grad_overflow": False, "on_overflow": "raise", "max_consecutive_skips": 2, "loss_scale": 4}
    problems = contradictions(given, "bf16")
    assert len(problems) == 4
    with pytest.raises(ValueError, match=r"on_overflow='raise' and .* disagree") as raised:
        OverflowSettings(**given)
    assert str(raised.value).splitlines() == contradictions(given)
    with pytest.raises(ValueError, match=r"scales fp16 losses") as raised:
        OverflowSettings(loss_scale=4, max_consecutive_skips=3).check("fp32")
    assert len(str(raised.value).splitlines()) == 2
