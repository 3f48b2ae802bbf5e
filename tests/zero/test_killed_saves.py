"""A process that is killed while it writes a checkpoint: the run resumes from the one before, or from the new one.

CI kills at a few points of two setups; ``KILLED_SAVES=20 python -m pytest -s tests/zero/test_killed_saves.py`` at 20 of
each of four, and counts.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from support.engines import build, masters
from support.ranks import RankError, RankGroup
from support.setup import Setup
from support.stage_3 import GATHERED
from support.windows import ALL, Micro, backward

COUNTED = os.environ.get("KILLED_SAVES")
POINTS = int(COUNTED or 2)
SETUPS = [
    Setup(stage, offload, "bf16", "fp32", optimizer="adamw", zero=GATHERED if stage == 3 else {})
    for stage in (2, 3)
    for offload in ((False, True) if COUNTED else (stage == 2,))
]
REQUESTS, FIRST_SAVE, SECOND_SAVE, END = 4, 2, 6, 12
"""Requests of a window, and after how many requests of the run it saves twice and ends."""


class Killer:
    """A profiler that kills its process at a call of a function; it counts Python's and those of C."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        self.calls += 1
        if self.calls == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(engine: Any, begin: int, end: int) -> None:
    for request in range(begin, end):
        backward(engine, Micro(ALL, request))
        if (request + 1) % REQUESTS == 0:
            engine.step(divisor=3.0)


def uninterrupted(setup: Setup) -> list[torch.Tensor]:
    engine = build(setup)
    train(engine, 0, END)
    weights = masters(engine)
    engine.destroy()
    return weights


def killed(setup: Setup, folder: str, same_tag: bool, rank: int, at: int) -> int:
    """Save twice, and die at a call of the second time on one rank; return the calls of the rank that does not die."""
    engine = build(setup)
    train(engine, 0, FIRST_SAVE)
    engine.save_checkpoint(folder, tag="one", client_state={"place": FIRST_SAVE})
    train(engine, FIRST_SAVE, SECOND_SAVE)
    killer = Killer(at if engine.global_rank == rank else 0)
    sys.setprofile(killer)
    engine.save_checkpoint(folder, tag="one" if same_tag else "two", client_state={"place": SECOND_SAVE})
    sys.setprofile(None)
    engine.destroy()
    return killer.calls


def resumed(setup: Setup, folder: str) -> tuple[int, list[torch.Tensor]]:
    engine = build(setup)
    path, state = engine.load_checkpoint(folder)
    assert path is not None
    train(engine, state["place"], END)
    weights = masters(engine)
    engine.destroy()
    return state["place"], weights


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_killed_save(two_ranks: RankGroup, setup: Setup, tmp_path: Path) -> None:
    """Either rank, under another tag than that of the checkpoint before and under the same, in turn."""
    wanted = two_ranks.run(uninterrupted, setup)
    calls = [two_ranks.run(killed, setup, str(tmp_path / f"whole {tag}"), tag, 0, 0) for tag in (False, True)]
    places = []
    for point in range(POINTS):
        rank, same_tag, folder = point % 2, (point + point // 2) % 2 == 1, str(tmp_path / str(point))
        at = int(calls[same_tag][rank] * (point + 0.5) / POINTS)
        group = RankGroup(2)
        try:
            group.run(killed, setup, folder, same_tag, rank, at, timeout=60)
        except RankError as error:
            assert "the process died (exit code -9)" in str(error)  # noqa: PT017 (nothing is raised by the last calls)
        group.stop()
        results = two_ranks.run(resumed, setup, folder)
        for (_, found), expected in zip(results, wanted, strict=True):
            assert all(map(torch.equal, found, expected))
        places.append(results[0][0])
    assert set(places) <= {FIRST_SAVE, SECOND_SAVE}
    assert FIRST_SAVE in places
    print(f"{setup}: {len(places)} of {POINTS} resume, {places.count(SECOND_SAVE)} of them from the new checkpoint")
