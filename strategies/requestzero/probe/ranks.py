"""The ranks of a probe: started, followed, and ended with the command."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

from requestzero.environment.machine import describe_machine
from requestzero.probe.options import Options
from requestzero.probe.result import Result

_LONGEST_WAIT = timedelta(minutes=10)
"""For another rank in a collective: ranks that stock lets drift apart end with an error, and not never."""


class RankFailure(RuntimeError):
    """Error of a rank that raised or died; the message names it and the reason. The others have been ended."""


def run_ranks(options: Options, report: Callable[[str], None]) -> Result:
    """Run all measurements in ``options.ranks`` processes of this machine.

    Args:
        options: of the run.
        report: called in this process with the name of the next measurement.

    Raises:
        RankFailure: a rank raised or died.
    """
    import torch.multiprocessing as ranks
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

    ours, theirs = multiprocessing.Pipe(duplex=False)
    found: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="probe-") as folder, patch.dict(os.environ, _environment(options)):
        try:
            context = ranks.spawn(_rank, (options, folder, theirs), nprocs=options.ranks, join=False)
            try:
                done = False
                while not done:
                    done = context.join(timeout=0.1)
                    _drain(ours, report, found)
            finally:
                _end(context.processes)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RankFailure(str(error).strip()) from None
    machine, rows = found
    return Result(options.record(), machine, rows)


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


def _environment(options: Options) -> dict[str, str]:
    """Return the variables that have to be set before a rank imports torch and DeepSpeed."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    accelerator = {"DS_ACCELERATOR": "cpu"} if options.device == "cpu" else {}
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), **accelerator}


def _rank(rank: int, options: Options, folder: str, pipe: Connection) -> None:
    """Measure on one rank; the first one reports and sends ``(machine, rows)``."""

    def report(text: str) -> None:
        if rank == 0:
            pipe.send(text)

    report("imports")
    with process_group(rank, options.ranks, options.device, folder), _quiet():
        from requestzero.probe.measure import measure_all

        rows = measure_all(options, report)
        if rank == 0:
            pipe.send((describe_machine(options.ranks), rows))


@contextmanager
def process_group(rank: int, ranks: int, device: str, folder: str) -> Iterator[None]:
    """Join this process to ``ranks``, which meet in ``folder``; on CUDA each has the device of its number.

    For a process of its own: sets what DeepSpeed reads from the environment, and silences its logger.
    """
    import deepspeed
    import torch
    from deepspeed.utils import logger

    from requestzero.zero.process_group import without_inference_operator

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    logger.setLevel("ERROR")
    if device == "cuda":
        torch.cuda.set_device(rank)
    with without_inference_operator():
        deepspeed.init_distributed(
            "nccl" if device == "cuda" else "gloo",
            auto_mpi_discovery=False,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=_LONGEST_WAIT,
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
