"""One training, in picklable terms; and what a rank has beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from requestzero.faults.combination import UPDATES, FrontEnd
from requestzero.faults.injection import Injector
from requestzero.faults.journal import Journal


@dataclass(frozen=True)
class Job:
    """A training with a front end."""

    front_end: FrontEnd
    stage: int
    """Of ZeRO."""
    folder: Path
    """Of its checkpoints."""
    checkpoint: Path | None = None
    """What it resumes from."""
    until: int = UPDATES
    """Updates after which it ends."""


@dataclass(frozen=True)
class Rank:
    """The rank's own part in a training."""

    number: int
    journal: Journal
    injector: Injector
