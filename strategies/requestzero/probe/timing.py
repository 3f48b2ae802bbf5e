"""Seconds of backward, boundary backward and step, with the engines of one configuration in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from requestzero.probe.engines import announce, built
from requestzero.probe.grid import Configuration, Engine
from requestzero.probe.memory import request_sizes
from requestzero.probe.models import ModelChoice

PARTS = ("backward", "boundary", "step")
"""A backward that ends no request, one that does, and the step."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def spread(values: list[float]) -> Spread:
    """Return the spread of two values or more."""
    low, median, high = statistics.quantiles(values, n=4)
    return Spread(median, low, high)


def ratios(values: list[float], others: list[float]) -> list[float]:
    """Return ``values`` divided by ``others``, pair by pair of neighbouring windows."""
    return [value / other for value, other in zip(values, others, strict=True)]


class Timed:
    """One engine and its windows."""

    def __init__(self, training: Any, model: ModelChoice, requests: int) -> None:
        self._training = training
        self._inputs = model.inputs(training)
        self._sizes = request_sizes(requests)

    def window(self) -> dict[str, float]:
        """Return the mean seconds of each part; forwards are not timed, nor the agreement of ranks beside them."""
        seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        for request, size in enumerate(self._sizes):
            announce(self._training, size, window_end=request == len(self._sizes) - 1)
            for micro in range(size):
                boundary = micro == size - 1
                self._training.set_gradient_accumulation_boundary(boundary)
                loss = self._training(self._inputs)
                part = "boundary" if boundary else "backward"
                seconds[part].append(_seconds(lambda loss=loss: self._training.backward(loss)))  # type: ignore[misc]
        seconds["step"].append(_seconds(self._training.step))
        return {part: statistics.mean(each) for part, each in seconds.items()}


def _seconds(call: Callable[[], Any]) -> float:
    from deepspeed.accelerator import get_accelerator

    dist.barrier()
    get_accelerator().synchronize()
    started = time.perf_counter()
    call()
    get_accelerator().synchronize()
    return time.perf_counter() - started


def measure_times(
    configuration: Configuration, engines: list[Engine], model: ModelChoice, requests: int, windows: int
) -> dict[Engine, dict[str, list[float]]]:
    """Return the seconds of every window by part, for each engine; their order changes with the window (collective)."""
    seconds: dict[Engine, dict[str, list[float]]] = {engine: {part: [] for part in PARTS} for engine in engines}
    with ExitStack() as stack:
        timed = {
            engine: Timed(stack.enter_context(built(configuration, engine, model.build(), lr=1e-6)), model, requests)
            for engine in engines
        }
        for each in timed.values():
            each.window()
        for number in range(windows):
            for engine in engines if number % 2 else reversed(engines):
                for part, value in timed[engine].window().items():
                    seconds[engine][part].append(value)
    return seconds
