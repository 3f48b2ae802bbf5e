"""Clipping that a loop asks for before a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from requestzero.zero.clipping import NextStepClipping
from requestzero.zero.common.window import UpdateWindow


def test_a_clip_is_forgotten_with_the_requests_that_it_was_for() -> None:
    window = UpdateWindow(micro_batches=1)
    engine: Any = SimpleNamespace(update_window=window)
    clipping = NextStepClipping()
    clipping.ask(engine, 0.5)
    clipping.begin_backward(window)
    assert clipping.asked(window) == 0.5
    window.micro_batches = 0  # the request was aborted, which the window outlives
    clipping.begin_backward(window)
    window.micro_batches = 1
    assert clipping.asked(window) is None


def test_of_several_clips_the_smallest_norm_counts() -> None:
    engine: Any = SimpleNamespace(update_window=UpdateWindow(micro_batches=1))
    clipping = NextStepClipping()
    for max_norm in (2.0, 0.5, 1.0, float("inf")):
        clipping.ask(engine, max_norm)
    assert clipping.asked(engine.update_window) == 0.5
    assert clipping.asked(UpdateWindow(micro_batches=1)) is None
