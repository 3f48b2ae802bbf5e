"""Clipping that a loop asks for before a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from requestzero.zero.common.next_step_clipping import NextStepClipping
from requestzero.zero.common.window import UpdateWindow


def test_of_several_clips_the_smallest_norm_counts() -> None:
    window = UpdateWindow(micro_batches=1)
    clipping = NextStepClipping()
    for max_norm in (2.0, 0.5, 1.0, float("inf")):
        clipping.ask(window, max_norm)
    assert clipping.asked(window) == 0.5
    assert clipping.asked(UpdateWindow(micro_batches=1)) is None


@pytest.mark.parametrize(("configured", "expected"), [(0.0, 2.0), (1.0, 1.0), (3.0, 2.0)])
def test_the_step_clips_at_the_smaller_of_both_norms(configured: float, expected: float) -> None:
    window = UpdateWindow(micro_batches=1)
    optimizer = SimpleNamespace(clip_grad=configured, window=window)
    clipping = NextStepClipping()
    clipping.ask(window, 2.0)
    with clipping.applied(optimizer):
        assert optimizer.clip_grad == expected
    assert optimizer.clip_grad == configured
