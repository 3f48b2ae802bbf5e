"""Trainings without a fault, run once each."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

from requestzero.faults.combination import UPDATES, FrontEnd
from requestzero.faults.ranks import End, Limits, run_ranks
from requestzero.faults.training.job import Job


class References:
    """The uninterrupted run of every front end and stage, and its checkpoints until some update.

    Args:
        folder: for their files.
        limits: of time.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self._runs: dict[str, list[End]] = {}
        self._lock = Lock()

    def whole(self, front_end: FrontEnd, stage: int) -> list[End]:
        """Return the ends of the ranks that have trained to the end."""
        return self._run(front_end, stage, UPDATES)

    def partial(self, front_end: FrontEnd, stage: int, until: int) -> Path:
        """Return the folder of the checkpoints of a run that has ended after so many updates; to be copied."""
        self._run(front_end, stage, until)
        return self._folder / _name(front_end, stage, until) / "checkpoints"

    def _run(self, front_end: FrontEnd, stage: int, until: int) -> list[End]:
        """Run a training, unless it was run.

        Raises:
            RuntimeError: it fails without a fault.
        """
        name = _name(front_end, stage, until)
        with self._lock:
            if name not in self._runs:
                folder = self._folder / name
                job = Job(front_end, stage, folder / "checkpoints", until=until)
                ends = run_ranks(job, None, folder / "ranks", self._limits)
                for end in ends:
                    if not end.record.ended:
                        raise RuntimeError(f"The training without a fault fails ({name}): {end.record.text or end}")
                self._runs[name] = ends
            return self._runs[name]


def _name(front_end: FrontEnd, stage: int, until: int) -> str:
    return f"{front_end.value}-{stage}-{until}"
