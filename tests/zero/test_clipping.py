"""Clipping that a loop asks for before a step."""

from __future__ import annotations

from requestzero.zero.common.next_step_clipping import NextStepClipping
from requestzero.zero.common.window import UpdateWindow


def test_of_several_clips_the_smallest_norm_counts() -> None:
    window = UpdateWindow(micro_batches=1)
    clipping = NextStepClipping()
    for max_norm in (2.0, 0.5, 1.0, float("inf")):
        clipping.ask(window, max_norm)
    assert clipping.asked(window) == 0.5
    assert clipping.asked(UpdateWindow(micro_batches=1)) is None
