"""Trainings to compare with, run once each."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Lock

from requestzero.faults.combination import UPDATES, Combination, FrontEnd
from requestzero.faults.places import checkpoints, place_of
from requestzero.faults.ranks import End, Limits, run_ranks
from requestzero.faults.setup import Setup
from requestzero.faults.training.job import Job


class References:
    """Uninterrupted runs, and their checkpoints.

    What all front ends are compared with is a loop over an engine, in which nothing is aborted and nothing is saved
    within a window: an aborted request, and a save, must leave nothing behind.

    Args:
        folder: for their files.
        limits: of time.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self._runs: dict[Job, list[End]] = {}
        self._locks: dict[Job, Lock] = {}
        self._lock = Lock()

    def whole(self, setup: Setup) -> list[End]:
        """Return the ends of the ranks that have trained to the end."""
        return self._run(self._job(FrontEnd.ENGINE, setup.reference(), UPDATES))

    def with_fault(self, combination: Combination) -> list[End]:
        """Return the ends of the ranks, with whose updates those of a training with this fault have to agree."""
        setup = combination.setup
        if not combination.omits_gradient:
            return self.whole(setup)
        fault = combination.in_reference()
        return self._run(Job(fault.front_end, fault.setup, self._folder / str(fault) / "checkpoints"), fault)

    def copy_checkpoints(self, combination: Combination, folder: Path) -> None:
        """Copy the checkpoints that a run has saved until the place of a fault into a new folder."""
        setup, place = combination.setup, combination.place
        job = self._job(combination.front_end, setup, combination.update + bool(combination.request))
        self._run(job)
        for checkpoint in checkpoints(job.folder, setup):
            if place_of(checkpoint, setup) <= place:
                shutil.copytree(checkpoint, folder / checkpoint.name)
        if (job.folder / "latest").exists():
            (folder / "latest").write_text(checkpoints(folder, setup)[0].name)

    def _job(self, front_end: FrontEnd, setup: Setup, until: int) -> Job:
        return Job(front_end, setup, self._folder / f"{front_end.value}, {setup}, {until}" / "checkpoints", until=until)

    def _run(self, job: Job, fault: Combination | None = None) -> list[End]:
        """Run a training, unless it was run.

        Raises:
            RuntimeError: it fails without a fault.
        """
        with self._lock:
            lock = self._locks.setdefault(job, Lock())
        with lock:
            if job not in self._runs:
                ends = run_ranks(job, fault, job.folder.parent / "ranks", self._limits)
                for end in ends if fault is None else ():
                    if not end.record.ended:
                        raise RuntimeError(
                            f"The training without a fault fails ({job.front_end.value}, {job.setup}): "
                            f"{end.record.text or end}"
                        )
                self._runs[job] = ends
            return self._runs[job]
