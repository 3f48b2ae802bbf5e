"""The groups of ranks of a self-test, one after another."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from requestzero.doctor.verify.result import Run, Verification
from requestzero.environment.machine import Machine
from requestzero.environment.proved_sources import differences
from requestzero.environment.versions import UNPROVED, deepspeed_folder
from requestzero.probe.ranks import Launch, RankFailure, Report, run_ranks


@dataclass(frozen=True)
class Group:
    """One group of ranks, and what it runs."""

    name: str
    ranks: int
    device: str
    shares_device: bool = False
    measures: bool = False
    """Also what only a GPU has, and the probe."""


def plan(gpus: int) -> list[Group]:
    """Return the groups for a machine with this many GPUs to use; two ranks on the CPU without any."""
    if gpus == 0:
        return [Group("two ranks on the CPU", 2, "cpu")]
    if gpus > 1:
        return [Group(f"{gpus} ranks on {gpus} GPUs", gpus, "cuda", measures=True)]
    return [
        Group("one rank on the GPU", 1, "cuda", measures=True),
        Group("two ranks that share the GPU", 2, "cuda", shares_device=True),
    ]


def verify(device: str | None, report: Report) -> Verification:
    """Run the self-test.

    Args:
        device: ``"cpu"`` or ``"cuda"``; ``None``: all GPUs, or the CPU without any.
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
    outcomes = [_run(group, report) for group in plan(gpus)]
    machine = next((machine for machine, _ in outcomes if machine is not None), None)
    return Verification(machine, differences(package), [run for _, run in outcomes], time.monotonic() - started)


def _run(group: Group, report: Report) -> tuple[Machine | None, Run]:
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        launch = Launch(
            partial(work, group, Path(folder)),
            group.ranks,
            group.device,
            group.shares_device,
            longest_wait=timedelta(minutes=2),
            environment={UNPROVED: "1", "PYTHONWARNINGS": "ignore"},
        )
        try:
            machine, run = run_ranks(launch, lambda text: report(f"{group.name}: {text}"))
        except RankFailure as failure:
            return None, Run(group.name, failure=str(failure))
        return machine, run


def work(group: Group, folder: Path, report: Callable[[str], None]) -> tuple[Machine, Run]:
    """Run everything on this rank; the result is the same on every rank (collective)."""
    from requestzero.doctor.verify.gpu import cannot_communicate, check_gpu, measure_columns
    from requestzero.doctor.verify.life_cycle import check_life_cycle
    from requestzero.doctor.verify.updates import compare_all
    from requestzero.environment.machine import describe_machine

    logging.getLogger("requestzero").setLevel("ERROR")  # windows are skipped on purpose
    machine = describe_machine(group.ranks)
    if group.shares_device:
        impossible = cannot_communicate()
        if impossible is not None:
            return machine, Run(group.name, checks=[impossible])
    cuda = group.device == "cuda"
    updates = compare_all(report, cuda)
    checks = check_life_cycle(report, folder)
    if not group.measures:
        return machine, Run(group.name, updates, checks)
    checks += check_gpu(report)
    columns, rows = measure_columns(group.ranks, report)
    return machine, Run(group.name, updates, [*checks, *columns], rows)
