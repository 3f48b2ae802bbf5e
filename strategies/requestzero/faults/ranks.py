"""The ranks of one training: processes that are started, waited for and, in a launcher's way, ended."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

from requestzero.faults.combination import RANKS, Combination, Fault
from requestzero.faults.injection import Injector
from requestzero.faults.journal import Journal, Record
from requestzero.faults.training.job import Job, Rank

# What a training imports: seconds, if every rank did it anew.
_PRELOADED = [
    "deepspeed.ops.op_builder.all_ops",
    "setuptools.command.build_ext",
    "datasets",
    "omegaconf",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "requestzero.faults.training.with_engine",
    "requestzero.faults.training.with_lightning",
    "requestzero.faults.training.with_accelerate",
    "requestzero.zero.engine",
    "requestzero.zero.initialization",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
]
_POLL_INTERVAL = 0.2


@dataclass(frozen=True)
class Limits:
    """Times, in seconds; generous, since ranks may share a busy machine."""

    end: float = 40.0
    """Within which the other ranks have to end by themselves, once one has."""
    whole: float = 150.0
    """Within which a training that nothing has stopped has to end."""
    longest_wait: float = 15.0
    """The process group's timeout where a rank is stopped for good."""


@dataclass(frozen=True)
class End:
    """The end of one rank."""

    record: Record
    code: int | None
    """Exit code; negative for a signal."""
    by_itself: bool
    """False where the launcher had to end it."""
    stack: str = ""
    """Of a rank that did not end."""


def run_ranks(job: Job, combination: Combination | None, folder: Path, limits: Limits) -> list[End]:
    """Train on all ranks, in processes of their own; return how each of them has ended.

    Args:
        job: the training.
        combination: the fault; ``None``: none.
        folder: an empty one, for the rendezvous and the ranks' records.
        limits: of time.
    """
    folder.mkdir(parents=True)
    context = _context()
    processes = [
        context.Process(target=_rank, args=(number, job, combination, folder, limits)) for number in range(RANKS)
    ]
    for process in processes:
        process.start()
    hung = _wait(processes, combination, limits)
    stacks = {number: _end(processes[number], folder / f"stack-{number}") for number in hung}
    for process in processes:
        process.join()
    return [
        End(Record.read(folder / f"record-{number}"), process.exitcode, number not in hung, stacks.get(number, ""))
        for number, process in enumerate(processes)
    ]


def _wait(processes: list[Any], combination: Combination | None, limits: Limits) -> list[int]:
    """Wait until all ranks have ended; return those that have not within the limits."""
    stopped = combination.rank if combination is not None and combination.fault is Fault.STOP else None
    deadline = time.monotonic() + limits.whole
    seen_end = False
    while True:
        alive = [number for number, process in enumerate(processes) if process.is_alive()]
        if not alive or time.monotonic() > deadline or (alive == [stopped] and seen_end):
            return alive
        if not seen_end and len(alive) < len(processes):
            seen_end, deadline = True, time.monotonic() + limits.end
        time.sleep(_POLL_INTERVAL)


def _end(process: Any, stack: Path) -> str:
    """Kill a rank, as a launcher does after a while; return where it was."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
    process.kill()
    process.join()
    return stack.read_text() if stack.exists() else ""


@cache
def _context() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    variables = {"TORCH_COMPILE_DISABLE": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with patch.dict(os.environ, variables):
        forkserver.ensure_running()
    return context


# --- on a rank ------------------------------------------------------------------------------------------------------


def _rank(number: int, job: Job, combination: Combination | None, folder: Path, limits: Limits) -> None:
    """Train on one rank; exit with 1 after an error, as a program does."""
    with (folder / f"log-{number}").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, (folder / f"stack-{number}").open("w"))
    journal = Journal(folder / f"record-{number}")
    rank = Rank(number, journal, Injector(combination, number, job.folder, journal))
    try:
        _join(number, folder, _longest_wait(combination, limits))
        from requestzero.faults.training import training

        training(job.front_end)(job, rank)
    except BaseException as error:
        journal.failed(error, _refuses(journal.engine))
        raise SystemExit(error.code if isinstance(error, SystemExit) else 1) from error
    journal.ended()
    sys.stdout.flush()


def _longest_wait(combination: Combination | None, limits: Limits) -> timedelta:
    stops = combination is not None and combination.fault is Fault.STOP
    return timedelta(seconds=limits.longest_wait if stops else 10 * limits.whole)


def _refuses(engine: Any) -> bool:
    """Return true if an engine refuses another request."""
    try:
        if engine is not None:
            engine.agreement.check()
    except RuntimeError:
        return True
    return False


def _join(number: int, folder: Path, longest_wait: timedelta) -> None:
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
    }
    import deepspeed
    import torch
    from deepspeed.utils import logger

    from requestzero.rank_check import watch
    from requestzero.zero.process_group import without_inference_operator

    torch.set_num_threads(1)
    logger.setLevel("ERROR")
    watch._POLL_INTERVAL = timedelta(seconds=_POLL_INTERVAL)
    with without_inference_operator():
        deepspeed.init_distributed(
            "gloo",
            auto_mpi_discovery=False,
            init_method=f"file://{folder}/store",
            rank=number,
            world_size=RANKS,
            timeout=longest_wait,
            verbose=False,
        )
