"""What comes between windows: a skipped one, a discarded one, a checkpoint and a resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from requestzero.doctor.verify.result import Check
from requestzero.doctor.verify.setup import Setup
from requestzero.doctor.verify.training import backward, build, difference, masters, masters_and_state
from requestzero.doctor.verify.updates import run_window
from requestzero.probe.windows import Window, random_windows, reference

_SETUPS = (
    Setup(stage=1, model="bf16", accum="fp32"),
    Setup(stage=2, offload=True, model="bf16", accum="fp32"),
)
_STAGE_3 = Setup(stage=3, model="bf16", accum="fp32", zero={"stage3_param_persistence_threshold": 0})
_CLIPPED = Setup(stage=2, config={"gradient_clipping": 1e6})
"""In fp32 nothing is checked, but clipping reads the norm."""


def check_life_cycle(report: Callable[[str], None], folder: Path, stage_3: bool) -> list[Check]:
    """Run the checks; return the same on every rank (collective).

    Args:
        report: called with the name of the next check.
        folder: for checkpoints, the same on all ranks.
        stage_3: also with ZeRO 3.
    """
    found = []
    for setup in [*_SETUPS, *([_STAGE_3] if stage_3 else [])]:
        place = "offload" if setup.offload else "device"
        checks = {
            "a window that is not finite is skipped, and nothing of it is left": partial(_skips, setup),
            "a discarded window leaves nothing": partial(_discards, setup),
            "a checkpoint inside a request is refused": partial(_refuses, setup, folder / f"refused-{setup.stage}"),
            "a resumed run ends as the uninterrupted one": partial(_resumes, setup, folder / f"stage-{setup.stage}"),
            "a run resumed inside a window does too": partial(
                _resumes, setup, folder / f"in-{setup.stage}", inside=True
            ),
        }
        for text, check in checks.items():
            name = f"ZeRO-{setup.stage} {place}: {text}"
            report(name)
            found.append(on_all_ranks(name, check))
    name = "fp32 with clipping: a window whose norm is not finite is skipped, and nothing of it is left"
    report(name)
    return [*found, on_all_ranks(name, partial(_skips, _CLIPPED))]


def on_all_ranks(name: str, check: Callable[[], bool]) -> Check:
    """Return whether ``check`` holds on every rank (collective)."""
    try:
        mine = bool(check()), ""
    except Exception as error:  # told in the result, where it has the check's name
        mine = False, f"{type(error).__name__}: {error}"
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    return Check(name, all(passed for passed, _ in by_rank), next((text for _, text in by_rank if text), ""))


@contextmanager
def _built(setup: Setup, **options: Any) -> Iterator[Any]:
    engine = build(setup, **options)
    try:
        yield engine
    finally:
        engine.destroy()


def _is_exact(engine: Any, window: Window) -> bool:
    before = masters(engine)
    run_window(engine, window)
    (expected,) = reference([window], dist.get_world_size())
    return all(map(torch.equal, difference(before, masters(engine)), expected))


def _skips(setup: Setup) -> bool:
    first, second = random_windows(2, 2, seed=101)
    with _built(setup) as engine:
        before = masters(engine)
        for micro in first:
            backward(engine, micro, factor=math.inf if dist.get_rank() == 0 else 1.0)
        engine.step()
        kept = all(map(torch.equal, before, masters(engine)))
        return kept and engine.skipped_updates == 1 and not engine.was_step_applied() and _is_exact(engine, second)


def _discards(setup: Setup) -> bool:
    first, second = random_windows(2, 2, seed=102)
    with _built(setup) as engine:
        for micro in first:
            backward(engine, micro)
        engine.zero_grad()
        return _is_exact(engine, second)


def _refuses(setup: Setup, folder: Path) -> bool:
    (window,) = random_windows(1, 1, seed=103)
    with _built(setup) as engine:
        backward(engine, replace(window[0], request_end=False))
        try:
            engine.save_checkpoint(str(folder))
        except RuntimeError:
            engine.zero_grad()
            return not folder.exists()
        return False


def _resumes(setup: Setup, folder: Path, inside: bool = False) -> bool:
    """``inside``: the checkpoint is saved inside a window."""
    windows, (begun,) = random_windows(4, 2, seed=104), random_windows(1, 1, seed=105)
    begun = begun if inside else []
    adamw = Setup(**{**vars(setup), "optimizer": "adamw"})
    with _built(adamw, lr=0.1) as engine:
        for window in windows[:2]:
            run_window(engine, window)
        for micro in begun:
            backward(engine, micro)
        engine.save_checkpoint(str(folder))
        for window in windows[2:]:
            run_window(engine, window)
        uninterrupted = masters_and_state(engine)
    with _built(adamw, lr=0.1) as engine:
        engine.load_checkpoint(str(folder))
        for window in windows[2:]:
            run_window(engine, window)
        return engine.applied_updates == 4 and all(map(torch.equal, uninterrupted, masters_and_state(engine)))
