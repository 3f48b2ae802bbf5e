"""Random windows in every configuration, compared bit for bit with plain PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from requestzero.doctor.verify.configurations import ALWAYS, configurations
from requestzero.doctor.verify.result import Updates
from requestzero.doctor.verify.setup import Setup
from requestzero.doctor.verify.training import backward, build, difference, masters, module_weights
from requestzero.probe.windows import Window, random_windows, reference

WINDOWS = 3
"""Of each configuration, of at most as many requests."""


def compare_all(
    report: Callable[[str], None], cuda: bool, stage_3: bool, end: float | None = None
) -> tuple[list[Updates], list[str]]:
    """Run the configurations; return their updates and what was left out, the same on every rank (collective).

    Args:
        report: called with the name of what comes next.
        cuda: the ranks use GPUs.
        stage_3: with ZeRO 3.
        end: on the clock of ``time.monotonic``, which the processes of a machine share: after it only the first
            :data:`ALWAYS` configurations are begun. ``None`` runs all.
    """
    found: list[Updates] = []
    setups = configurations(cuda, stage_3)
    for number, setup in enumerate(setups):
        if number >= ALWAYS and end is not None and _is_over(end):
            return found, [str(each) for each in setups[number:]]
        report(str(setup))
        found.append(compare(setup, telling_windows(number)))
    return found, []


def _is_over(end: float) -> bool:
    """Return whether it is later, as the first rank sees it (collective)."""
    over = [time.monotonic() > end]
    dist.broadcast_object_list(over, src=0)
    return over[0]


def telling_windows(number: int) -> list[Window]:
    """Return random windows of which one has several requests and an absent parameter; each number has its own."""
    drawn = (random_windows(WINDOWS, WINDOWS, seed=seed) for seed in count(1000 * number))
    return next(windows for windows in drawn if any(map(_is_telling, windows)))


def _is_telling(window: Window) -> bool:
    has_absent = not all(map(any, zip(*(micro.uses for micro in window), strict=True)))
    return has_absent and sum(micro.request_end for micro in window) > 1


def compare(setup: Setup, windows: list[Window]) -> Updates:
    """Compare the updates of one configuration (collective). An error on all ranks is told in the result."""
    expected = reference(windows, dist.get_world_size())
    updates = sum(map(len, expected))
    try:
        wrong = _wrong_on_a_rank(_wrong_here(setup, windows, expected))
    except Exception as error:  # such as an option that this version of DeepSpeed does not have
        return Updates(str(setup), updates, updates, f"{type(error).__name__}: {error}")
    return Updates(str(setup), updates, wrong)


def _wrong_here(setup: Setup, windows: list[Window], expected: list[list[torch.Tensor]]) -> list[bool]:
    engine = build(setup)
    wrong = []
    try:
        for window, wanted in zip(windows, expected, strict=True):
            before = masters(engine)
            run_window(engine, window, setup.managed)
            after = masters(engine)
            for got, exact, weight, master in zip(
                difference(before, after), wanted, module_weights(engine), after, strict=True
            ):
                wrong.append(not torch.equal(got, exact) or not _is_cast(engine, weight, master))
    finally:
        engine.destroy()
    return wrong


def _is_cast(engine: Any, weight: torch.Tensor, master: torch.Tensor) -> bool:
    dtype = next(engine.module.parameters()).dtype
    return torch.equal(weight, master.to(dtype).float())


def run_window(engine: Any, window: Window, managed: bool = True) -> None:
    """Run the micro-batches of a window and step (collective)."""
    for micro in window:
        backward(engine, micro, mark=managed)
    engine.step()


def _wrong_on_a_rank(wrong: list[bool]) -> int:
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, wrong)
    return sum(map(any, zip(*by_rank, strict=True)))
