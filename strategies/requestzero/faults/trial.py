"""One combination: the training with the fault, and the one that resumes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from requestzero.faults.combination import Combination, Point
from requestzero.faults.expectation import broken, outcome
from requestzero.faults.places import checkpoints, describe
from requestzero.faults.ranks import End, Limits, run_ranks
from requestzero.faults.references import References
from requestzero.faults.training.job import Job


@dataclass
class Result:
    """What became of one combination."""

    combination: Combination
    outcome: str = ""
    resumed: str = ""
    """What the run was resumed from."""
    broken: list[str] = field(default_factory=list)
    """What did not hold."""
    seconds: float = 0.0


def try_out(combination: Combination, references: References, folder: Path, limits: Limits) -> Result:
    """Run one combination, and compare what it leaves with the uninterrupted run.

    Args:
        combination: the fault.
        references: the runs without one.
        folder: an empty one for all files.
        limits: of time.
    """
    start = time.monotonic()
    job = Job(combination.front_end, combination.setup, folder / "checkpoints")
    if combination.point is Point.LOAD:
        references.copy_checkpoints(combination, job.folder)
        job = replace(job, checkpoint=checkpoints(job.folder, job.setup)[0])
    ends = run_ranks(job, combination, folder / "fault", limits)
    reference = references.with_fault(combination)
    result = Result(combination, outcome(combination, ends), broken=list(broken(combination, ends, reference)))
    if not all(end.record.ended for end in ends):
        _resume(job, ends, references.whole(job.setup), folder, limits, result)
    result.seconds = time.monotonic() - start
    return result


def _resume(job: Job, ends: list[End], reference: list[End], folder: Path, limits: Limits, result: Result) -> None:
    """Resume from the newest checkpoint; from the one before, where that one is refused and may be."""
    combination, setup = result.combination, job.setup
    saved = min(end.record.saved for end in ends) or (combination.place if combination.point is Point.LOAD else 0)
    refused = []
    for attempt, checkpoint in enumerate([*checkpoints(job.folder, setup), None]):
        resumed = run_ranks(replace(job, checkpoint=checkpoint), None, folder / f"resume-{attempt}", limits)
        if all(end.record.started is not None for end in resumed):
            break
        refused.append(resumed[0].record.error or f"exit code {resumed[0].code}")
    start = resumed[0].record.started or 0
    newer = f" (newer ones are refused: {', '.join(refused)})" if refused else ""
    result.resumed = describe(start, setup) + newer
    if saved - start > (setup.place_step if combination.damages else 0):
        result.broken.append(f"{describe(saved, setup)} was saved, and the run resumes from {describe(start, setup)}")
    for number, (end, wanted) in enumerate(zip(resumed, reference, strict=True)):
        if not end.record.ended:
            result.broken.append(f"rank {number} of the resumed run: {end.record.error}: {end.record.text[:200]}")
        elif any(wanted.record.updates[update] != found for update, found in end.record.updates.items()):
            result.broken.append(f"rank {number} of the resumed run ends with other weights")
