"""A signal inside a request, in a loop of one's own: the loop saves at the request's end, as the guide shows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from support.accelerate_loops import Loop, data, prepare, weights
from support.accelerate_state import fresh
from support.engines import build, masters
from support.ranks import RankGroup
from support.setup import Setup
from support.windows import ALL, Micro, backward

REQUESTS, WINDOW, SIGNALLED = 9, 4, 5
"""Requests of a run and of a window, and the one in which the signal comes to one rank; each has two micro-batches."""


class Stop:
    """The flag that a handler of the signal sets, and on which the ranks agree at every request's end."""

    def __init__(self) -> None:
        self._flag = torch.zeros(())

    def note(self, *_: Any) -> None:
        self._flag.fill_(1.0)

    def is_set(self) -> bool:
        torch.distributed.all_reduce(self._flag)
        return bool(self._flag.item())


@contextmanager
def handling(sends: bool) -> Iterator[tuple[Stop, Any]]:
    """Set the flag for SIGUSR2; gives it, and what may send the signal in a micro-batch."""

    def micro_batch(request: int, part: int) -> None:
        if sends and (request, part, torch.distributed.get_rank()) == (SIGNALLED, 0, 1):
            os.kill(os.getpid(), signal.SIGUSR2)

    stop = Stop()
    before = signal.signal(signal.SIGUSR2, stop.note)
    try:
        yield stop, micro_batch
    finally:
        signal.signal(signal.SIGUSR2, before)


def with_engine(setup: Setup, folder: str, sends: bool, resumes: bool) -> tuple[int, list[torch.Tensor]]:
    engine = build(setup)
    begin = engine.load_checkpoint(folder)[1]["requests"] if resumes else 0
    done = begin
    with handling(sends) as (stop, micro_batch):
        while done < REQUESTS:
            for part in (0, 1):
                backward(engine, Micro(ALL, 2 * done + part, request_end=part == 1))
                micro_batch(done, part)
            done += 1
            if done % WINDOW == 0:
                engine.step(normalization="mean")
            if stop.is_set():
                engine.save_checkpoint(folder, client_state={"requests": done})
                break
    if done == REQUESTS:
        engine.step(normalization="mean")
    found = masters(engine)
    engine.destroy()
    return done, found


def with_accelerate(stage: int, folder: str, sends: bool, resumes: bool) -> tuple[int, list[float]]:
    with fresh():
        accelerator, model, optimizer, *_ = prepare(Loop(plugin={"zero_stage": stage}, schedule=False))
        requests = accelerator.deepspeed_plugin.requests(accelerator)
        if resumes:
            accelerator.load_state(folder)
        rows = data(2 * REQUESTS, 2).view(REQUESTS, 2, 2, -1)[:, :, accelerator.process_index]
        done = SIGNALLED + 1 if resumes else 0
        with handling(sends) as (stop, micro_batch):
            while done < REQUESTS:
                with requests.request():
                    for part in (0, 1):
                        accelerator.backward(model(rows[done, part][None].to(accelerator.device)))
                        micro_batch(done, part)
                done += 1
                if done % WINDOW == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if stop.is_set():
                    accelerator.save_state(folder)
                    break
        if done == REQUESTS:
            optimizer.step()
        found = weights(accelerator, model)
        accelerator.free_memory()
        return done, found


@pytest.mark.parametrize("stage", [2, 3])
def test_engine(two_ranks: RankGroup, stage: int, tmp_path: Path) -> None:
    setup = Setup(stage=stage, optimizer="adamw")
    whole = two_ranks.run(with_engine, setup, str(tmp_path), False, False)
    assert [done for done, _ in two_ranks.run(with_engine, setup, str(tmp_path), True, False)] == [SIGNALLED + 1] * 2
    for (_, want), (done, got) in zip(
        whole, two_ranks.run(with_engine, setup, str(tmp_path), False, True), strict=True
    ):
        assert done == REQUESTS
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate(two_ranks: RankGroup, stage: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    whole = two_ranks.run(with_accelerate, stage, folder, False, False)
    assert [done for done, _ in two_ranks.run(with_accelerate, stage, folder, True, False)] == [SIGNALLED + 1] * 2
    assert two_ranks.run(with_accelerate, stage, folder, False, True) == whole
