"""Operators, host reads and copies of a boundary backward and a step."""

from __future__ import annotations

from typing import Any

from requestzero.probe.counters import Operators, host_memory
from requestzero.probe.engines import announce, built
from requestzero.probe.grid import Configuration, Engine
from requestzero.probe.models import ModelChoice


def count_costs(configuration: Configuration, engine: Engine, model: ModelChoice) -> dict[str, int]:
    """Count the second window of two requests of one micro-batch each (collective).

    ``..._backward`` are of the second request's backward, a boundary that goes on from what the first one left;
    ``..._step`` are of the step. Copies and bytes are of the whole second request, since a partition may come back
    at its forward's end: to the host gradient and, to be added to, back from it.
    """
    with built(configuration, engine, model.build(), lr=1e-6) as training:
        _window(training, model)
        in_forward, in_backward, in_step = _window(training, model)
    return {
        "operators_backward": in_backward.total,
        "operators_step": in_step.total,
        "host_reads_backward": in_backward.host_reads,
        "host_reads_step": in_step.host_reads,
        "copies_to_host": in_forward.copies_into_destinations + in_backward.copies_into_destinations,
        "bytes_to_host": in_forward.bytes_to_host + in_backward.bytes_to_host,
        "copies_from_host": in_forward.copies_from_host + in_backward.copies_from_host,
        "bytes_from_host": in_forward.bytes_from_host + in_backward.bytes_from_host,
    }


def _window(training: Any, model: ModelChoice) -> tuple[Operators, Operators, Operators]:
    """Run a window; count the second request's forward and backward, and the step."""
    inputs = model.inputs(training)
    for window_end in (False, True):
        announce(training, 1, window_end)
        training.set_gradient_accumulation_boundary(True)
        with Operators(host_memory(training)) as in_forward:
            loss = training(inputs)
        with Operators(host_memory(training)) as in_backward:
            training.backward(loss)
    with Operators() as in_step:
        training.step()
    return in_forward, in_backward, in_step
