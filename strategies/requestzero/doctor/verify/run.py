"""The groups of ranks of a self-test, one after another."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import Path

from requestzero.doctor.verify.result import Run, Verification
from requestzero.environment.machine import Machine
from requestzero.environment.proved_sources import differences
from requestzero.environment.versions import UNPROVED, deepspeed_folder
from requestzero.probe.ranks import Launch, RankFailure, Report, run_ranks

CPU_TIME = 50.0
"""Seconds from the start after which no more configurations are begun on the CPU, so that all ends within a minute."""
GPU_LIMIT = 8 * 60.0
"""Seconds that all groups on GPUs may take together: those that are not done then are ended, and said to be."""


class Part(Enum):
    """Work of one group, so that one that fails or hangs costs the others nothing but its time."""

    UPDATES = "updates"
    GPU = "streams and memory"
    PROBE = "the probe"


Outcome = tuple[Machine | None, Run]
"""The machine as the ranks saw it, ``None`` where they failed, and their results."""


@dataclass(frozen=True)
class Group:
    """One group of ranks, and what it runs."""

    name: str
    ranks: int
    device: str
    part: Part = Part.UPDATES
    shares_device: bool = False
    limit: float | None = None
    """Seconds after which it is ended."""


def plan(gpus: int) -> list[Group]:
    """Return the groups for a machine with this many GPUs to use; two ranks on the CPU without any."""
    if gpus == 0:
        return [Group("two ranks on the CPU", 2, "cpu")]
    name = f"{gpus} ranks on {gpus} GPUs" if gpus > 1 else "one rank on the GPU"
    sharing = [Group("two ranks that share the GPU", 2, "cuda", shares_device=True, limit=150)]
    return [
        Group(name, gpus, "cuda", limit=210),
        Group(f"{name}, streams and memory", gpus, "cuda", Part.GPU, limit=120),
        *(sharing if gpus == 1 else []),
        Group(f"{name}, probe", gpus, "cuda", Part.PROBE, limit=240),
    ]


def verify(device: str | None, report: Report, complete: bool = False) -> Verification:
    """Run the self-test.

    Args:
        device: ``"cpu"`` or ``"cuda"``; ``None``: all GPUs, or the CPU without any.
        complete: all configurations, however long they take on the CPU.
        report: called with the name of what comes next.

    Raises:
        ValueError: no GPU is there and one was asked for.
        ImportError: DeepSpeed is not installed.
    """
    import torch

    started = time.monotonic()
    package = deepspeed_folder()
    if package is None:
        raise ImportError("DeepSpeed is not installed, so that there is nothing to test.")
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise ValueError("--device cuda is not allowed: PyTorch finds no GPU here. Leave it out, or give cpu.")
    different_at_stage_3 = differences(package, stage_3=True)
    stage_3 = not different_at_stage_3 or os.environ.get(UNPROVED) == "1"
    end = started + CPU_TIME if not gpus and not complete else None
    outcomes = [run_group(group, stage_3, started, report, end) for group in plan(gpus)]
    return Verification(
        next((machine for machine, _ in outcomes if machine is not None), None),
        differences(package),
        different_at_stage_3,
        [run for _, run in outcomes],
        time.monotonic() - started,
        stage_3,
        gpus,
    )


def run_group(group: Group, stage_3: bool, started: float, report: Report, end: float | None = None) -> Outcome:
    """Run one group, for as long as its limit and that of all groups allow.

    Args:
        group: the group.
        stage_3: with ZeRO 3.
        started: ``time.monotonic()`` of the whole self-test.
        report: called with the name of what comes next.
        end: see :func:`~requestzero.doctor.verify.updates.compare_all`.
    """
    limit = None
    if group.limit is not None:
        limit = min(group.limit, GPU_LIMIT - (time.monotonic() - started))
        if limit <= 0:
            return None, Run(group.name, failure=f"not begun: the {GPU_LIMIT:.0f} s of the self-test are over")
    last = "its begin"

    def tell(text: str) -> None:
        nonlocal last
        last = text
        report(f"{group.name}: {text}")

    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        launch = Launch(
            partial(work, group, Path(folder), stage_3, end),
            group.ranks,
            group.device,
            group.shares_device,
            longest_wait=timedelta(minutes=2),
            environment={UNPROVED: "1", "PYTHONWARNINGS": "ignore"},
            limit=limit,
        )
        try:
            return run_ranks(launch, tell)
        except RankFailure as failure:
            return None, Run(group.name, failure=f"at {last}: {failure}")


def work(group: Group, folder: Path, stage_3: bool, end: float | None, report: Callable[[str], None]) -> Outcome:
    """Run the group's part on this rank; the result is the same on every rank (collective)."""
    from requestzero.doctor.verify.gpu import cannot_communicate, check_gpu
    from requestzero.doctor.verify.gpu_probe import measure_columns
    from requestzero.doctor.verify.life_cycle import check_life_cycle
    from requestzero.doctor.verify.updates import compare_all
    from requestzero.environment.machine import describe_machine

    logging.getLogger("requestzero").setLevel("ERROR")  # windows are skipped on purpose
    machine = describe_machine(group.ranks)
    impossible = cannot_communicate() if group.shares_device else None
    if impossible is not None:
        return machine, Run(group.name, checks=[impossible])
    if group.part is Part.GPU:
        return machine, Run(group.name, checks=check_gpu(report, stage_3))
    if group.part is Part.PROBE:
        columns, rows = measure_columns(group.ranks, stage_3, report)
        return machine, Run(group.name, checks=columns, probe=rows)
    checks = check_life_cycle(report, folder, stage_3)  # first: of the updates some may be left out
    updates, left_out = compare_all(report, group.device == "cuda", stage_3, end)
    return machine, Run(group.name, updates, checks, left_out=left_out)
