"""A process that is killed while it writes a checkpoint: the run resumes from the one before, or from the new one.

CI kills at a few points; ``KILLED_SAVES=20 python -m pytest -s tests/zero/test_killed_saves.py`` at 20 and counts.
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
from support.windows import ALL, Micro, backward

POINTS = int(os.environ.get("KILLED_SAVES", "3"))
SETUP = Setup(2, True, "bf16", "fp32", optimizer="adamw")
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


def uninterrupted() -> list[torch.Tensor]:
    engine = build(SETUP)
    train(engine, 0, END)
    weights = masters(engine)
    engine.destroy()
    return weights


def killed(folder: str, same_tag: bool, rank: int, at: int) -> int:
    """Save twice, and die at a call of the second time on one rank; return the calls of the rank that does not die."""
    engine = build(SETUP)
    train(engine, 0, FIRST_SAVE)
    engine.save_checkpoint(folder, tag="one", client_state={"place": FIRST_SAVE})
    train(engine, FIRST_SAVE, SECOND_SAVE)
    killer = Killer(at if engine.global_rank == rank else 0)
    sys.setprofile(killer)
    engine.save_checkpoint(folder, tag="one" if same_tag else "two", client_state={"place": SECOND_SAVE})
    sys.setprofile(None)
    engine.destroy()
    return killer.calls


def resumed(folder: str) -> tuple[int, list[torch.Tensor]]:
    engine = build(SETUP)
    path, state = engine.load_checkpoint(folder)
    assert path is not None
    train(engine, state["place"], END)
    weights = masters(engine)
    engine.destroy()
    return state["place"], weights


@pytest.mark.slow
@pytest.mark.parametrize("same_tag", [False, True], ids=["another_tag", "same_tag"])
def test_a_killed_save(two_ranks: RankGroup, same_tag: bool, tmp_path: Path) -> None:
    wanted = two_ranks.run(uninterrupted)
    calls = two_ranks.run(killed, str(tmp_path / "whole"), same_tag, 0, 0)
    places = []
    for point in range(POINTS):
        rank, folder = point % 2, str(tmp_path / str(point))
        group = RankGroup(2)
        try:
            group.run(killed, folder, same_tag, rank, int(calls[rank] * (point + 0.5) / POINTS), timeout=60)
        except RankError as error:
            assert "the process died (exit code -9)" in str(error)  # noqa: PT017 (nothing is raised by the last calls)
        group.stop()
        results = two_ranks.run(resumed, folder)
        for (_, found), expected in zip(results, wanted, strict=True):
            assert all(map(torch.equal, found, expected))
        places.append(results[0][0])
    assert set(places) <= {FIRST_SAVE, SECOND_SAVE}
    assert FIRST_SAVE in places
    print(f"{len(places)} of {POINTS} resume, {places.count(SECOND_SAVE)} of them from the new checkpoint")
