"""The result of the self-test: printed, and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from requestzero.doctor.status import Status
from requestzero.environment.machine import Machine
from requestzero.environment.versions import UNPROVED


@dataclass(frozen=True)
class Updates:
    """The updates of one configuration."""

    configuration: str
    updates: int
    """Parameter updates that were compared: windows x parameters."""
    wrong: int
    """Those of which a bit or more is wrong on a rank; all of them where the configuration raised an error."""
    error: str = ""


@dataclass(frozen=True)
class Check:
    """One check that is none of updates."""

    name: str
    passed: bool | None
    """``None``: only measured, or not possible on this machine, which ``detail`` says."""
    detail: str = ""


@dataclass(frozen=True)
class Run:
    """One group of ranks."""

    name: str
    updates: list[Updates] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    probe: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the probe, where it ran."""
    left_out: list[str] = field(default_factory=list)
    """Configurations for which there was no time."""
    failure: str = ""
    """Of the ranks themselves, which then have no other result."""

    @property
    def wrong(self) -> int:
        return sum(each.wrong for each in self.updates)

    @property
    def passed(self) -> bool:
        return not self.failure and not self.wrong and all(check.passed is not False for check in self.checks)


@dataclass(frozen=True)
class Verification:
    """A whole self-test."""

    machine: Machine | None
    """As the first group of ranks saw it."""
    different: tuple[str, ...]
    """Definitions of DeepSpeed that are not those that were proved, those of ZeRO 3 left out."""
    different_at_stage_3: tuple[str, ...]
    """Those that only ZeRO 3 relies on."""
    runs: list[Run]
    seconds: float
    stage_3: bool = True
    """Whether ZeRO 3 was tested."""
    gpus: int = 0
    """Used by the ranks; 0 on the CPU."""

    @property
    def updates(self) -> int:
        return sum(each.updates for run in self.runs for each in run.updates)

    @property
    def wrong(self) -> int:
        return sum(run.wrong for run in self.runs)

    @property
    def passed(self) -> bool:
        return all(run.passed for run in self.runs)

    @property
    def status(self) -> Status:
        return Status.FINE if self.passed else Status.WRONG

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``."""
        totals = {"passed": self.passed, "updates": self.updates, "wrong": self.wrong}
        return {**totals, **asdict(self), "runs": [{"passed": run.passed, **asdict(run)} for run in self.runs]}

    def lines(self) -> list[str]:
        """Return the report: what went wrong, and the totals."""
        found = []
        for run in self.runs:
            found += [f"{run.name}: {run.failure}"] if run.failure else _lines_of(run)
        for stages, different in {"1 to 3": self.different, "3": self.different_at_stage_3}.items():
            if different:
                found.append(
                    f"DeepSpeed: {len(different)} definitions of stages {stages} are not those that were proved."
                )
        done = sum(len(run.updates) for run in self.runs)
        left_out = sum(len(run.left_out) for run in self.runs)
        configurations = f"{done} of {done + left_out}" if left_out else f"{done}"
        total = f"{self.wrong} of {self.updates} parameter updates are wrong, in {configurations} configurations"
        outcome = "passed" if self.passed else "FAILED"
        outcome += "; for the others there was no time (--all runs them)" if left_out else ""
        if not self.stage_3:
            outcome += f"; stage 3, refused with this DeepSpeed, was left out ({UNPROVED}=1 tests it)"
        return [*found, f"{total} ({self.seconds:.0f} s): {outcome}"]


def _lines_of(run: Run) -> list[str]:
    wrong = [
        f"{run.name}: {each.configuration}: {each.wrong} of {each.updates} updates are wrong"
        for each in run.updates
        if each.wrong and not each.error
    ]
    errors = Counter(each.error for each in run.updates if each.error)
    wrong += [f"{run.name}: {count} configurations: {error}" for error, count in errors.items()]
    marks = {True: "ok", False: "WRONG", None: "measured"}
    checks = [f"{run.name}: {each.name}: {marks[each.passed]} {each.detail}".rstrip() for each in run.checks]
    return wrong + checks
