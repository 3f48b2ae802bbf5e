"""The ranks of a probe or a self-test: started, followed, and ended with the command."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

LONGEST_WAIT = timedelta(minutes=10)
Report = Callable[[str], None]
"""Called with the name of what comes next."""


@dataclass(frozen=True)
class Launch:
    """Work for ranks of this machine."""

    work: Callable[[Report], Any]
    """Called on every rank; has to be picklable."""
    ranks: int
    device: str
    """``"cuda"`` or ``"cpu"``."""
    shares_device: bool = False
    """All ranks use the first GPU, and gloo, since NCCL allows a device only one rank."""
    longest_wait: timedelta = LONGEST_WAIT
    """For another rank in a collective: ranks that stock lets drift apart end with an error, and not never."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the ranks."""
    limit: float | None = None
    """Seconds after which ranks that are not done are ended."""


class RankFailure(RuntimeError):
    """Error of a rank that raised or died; the message names it and the reason. The others have been ended."""


def run_ranks(launch: Launch, report: Report) -> Any:
    """Call ``launch.work`` in as many processes of this machine as it says; return what the first rank's call returns.

    Args:
        launch: the work.
        report: called in this process with what the first rank reports.

    Raises:
        RankFailure: a rank raised or died, or the time was over.
    """
    import torch.multiprocessing as ranks
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

    ours, theirs = multiprocessing.Pipe(duplex=False)
    found: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, patch.dict(os.environ, _environment(launch)):
        try:
            context = ranks.spawn(_rank, (launch, folder, theirs), nprocs=launch.ranks, join=False)
            try:
                end = math.inf if launch.limit is None else time.monotonic() + launch.limit
                while not context.join(timeout=0.1):
                    _drain(ours, report, found)
                    if time.monotonic() > end:
                        raise RankFailure(f"ended, since it was not done after {launch.limit:.0f} s")
                _drain(ours, report, found)
            finally:
                _end(context.processes)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RankFailure(str(error).strip()) from None
    return found[0]


def _end(processes: Sequence[BaseProcess]) -> None:
    """End processes that still run after an interrupt of this one alone: its end would wait for them."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()


def _drain(pipe: Connection, report: Callable[[str], None], found: list[Any]) -> None:
    while pipe.poll():
        message = pipe.recv()
        if isinstance(message, str):
            report(message)
        else:
            found.extend(message)


def _environment(launch: Launch) -> dict[str, str]:
    """Return the variables that have to be set before a rank imports torch and DeepSpeed."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // launch.ranks))
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        "DS_ACCELERATOR": launch.device,
        **launch.environment,
    }


def _rank(rank: int, launch: Launch, folder: str, pipe: Connection) -> None:
    """Do the work on one rank; the first one reports and sends the result."""

    def report(text: str) -> None:
        if rank == 0:
            pipe.send(text)

    with suppress(OSError):  # standard error is closed
        os.dup2(2, 1)  # libraries print there from C++, as gloo does in PyTorch 2.9, and the command may print JSON
    report("imports")
    group = process_group(rank, launch.ranks, launch.device, folder, launch.shares_device, launch.longest_wait)
    with group, _quiet():
        result = launch.work(report)
        if rank == 0:
            pipe.send((result,))


@contextmanager
def process_group(
    rank: int, ranks: int, device: str, folder: str, shares_device: bool = False, longest_wait: timedelta = LONGEST_WAIT
) -> Iterator[None]:
    """Join this process to ``ranks``, which meet in ``folder``; on CUDA each has the device of its number.

    For a process of its own: sets what DeepSpeed reads from the environment, and silences its logger.

    Args:
        rank: of this process.
        ranks: their number.
        device: ``"cuda"`` or ``"cpu"``.
        folder: an empty one, the same for all ranks.
        shares_device: all ranks use the first GPU, and gloo, since NCCL allows a device only one rank.
        longest_wait: for another rank in a collective.
    """
    import deepspeed
    import torch
    from deepspeed.utils import logger

    from requestzero.zero.process_group import without_inference_operator

    number = 0 if shares_device else rank
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks)}
    logger.setLevel("ERROR")
    if device == "cuda":
        torch.cuda.set_device(number)
    with without_inference_operator():
        deepspeed.init_distributed(
            "nccl" if device == "cuda" and not shares_device else "gloo",
            auto_mpi_discovery=False,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=longest_wait,
            verbose=False,
        )
    yield
    torch.distributed.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence output that would interrupt the progress bar.

    DeepSpeed's ``BF16_Optimizer`` prints memory, and PyTorch warns of functions that DeepSpeed calls.
    """
    with open(os.devnull, "w") as nothing, patch.object(sys, "stdout", nothing), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
