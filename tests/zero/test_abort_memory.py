"""Memory over many short requests, counted: live tensors and their bytes."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engines import build
from support.models import OneWeight, feed
from support.overflow_configs import overflow_config
from support.ranks import RankGroup
from support.setup import Setup

REQUESTS_PER_WINDOW = 8


def train(engine: Any, folder: str, windows: int, first: int) -> None:
    """Windows of eight requests, two of which are aborted; every fourth window overflows; and a save."""
    for window in range(first, first + windows):
        for request in range(REQUESTS_PER_WINDOW):
            engine.begin_request(f"{window}.{request}", micro_batches=1, once=True)
            overflows = request == 6 and window % 4 == 3
            feed(engine, float("nan") if overflows else 1.0)
            if request % 3 == 2:
                engine.abort_request("every third")
        engine.step()
    engine.save_checkpoint(folder, tag="same")


def occupy_threads(engine: Any) -> None:
    """Let every thread of the group in which ranks agree send something: it holds on to what it has sent last.

    The collectives are under way together, so that one thread does not do all of them.
    """
    group = engine.agreement._channel._group
    works = [torch.distributed.all_reduce(each, group=group, async_op=True) for each in torch.zeros(8, 1)]
    for work in works:
        work.wait()


def live(engine: Any) -> tuple[int, int]:
    """Number of live tensors in this process, and the bytes of their storages: the least of some looks.

    A thread that has sent something lets go of it a moment after the wait for it is over.
    """
    occupy_threads(engine)
    return min(look() for _ in range(8))


def look() -> tuple[int, int]:
    """Return the number of live tensors and their bytes, 50 milliseconds from now."""
    time.sleep(0.05)
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return len(tensors), sum(storages.values())


def measure(setup: Setup, folder: str, rounds: int, windows: int) -> tuple[list[tuple[int, int]], int]:
    """Live tensors after each of some rounds, the first of which is left out, and requests that were aborted."""
    engine = build(setup, model=OneWeight())
    found = []
    for number in range(rounds):
        train(engine, folder, windows, first=number * windows)
        found.append(live(engine))
    aborted = engine.aborted_requests
    engine.destroy()
    return found[1:], aborted


ABORT = {"requestzero": {"abort": True}}


@pytest.mark.parametrize(
    "setup",
    [
        Setup(model="bf16", accum="bf16", config=ABORT | overflow_config("bf16")),
        Setup(offload=True, model="bf16", config=ABORT | overflow_config("bf16")),
    ],
    ids=str,
)
def test_live_tensors_are_as_many_after_many_requests(two_ranks: RankGroup, setup: Setup, tmp_path: Path) -> None:
    for found, aborted in two_ranks.run(measure, setup, str(tmp_path), rounds=4, windows=8):
        assert aborted == 4 * 8 * 2
        assert len(set(found)) == 1, found
