"""One training, in picklable terms; and what a rank has beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from requestzero.faults.combination import UPDATES, FrontEnd
from requestzero.faults.injection import Injector
from requestzero.faults.journal import Journal
from requestzero.faults.places import name_at, place_of
from requestzero.faults.setup import Setup


@dataclass(frozen=True)
class Job:
    """A training with a front end."""

    front_end: FrontEnd
    setup: Setup
    folder: Path
    """Of its checkpoints."""
    checkpoint: Path | None = None
    """What it resumes from."""
    until: int = UPDATES
    """Updates after which it ends."""

    @property
    def start(self) -> int:
        """Requests that have come until the checkpoint."""
        return place_of(self.checkpoint, self.setup)

    def saves_at(self, place: int) -> bool:
        """Return whether a checkpoint is saved after so many requests."""
        return self.setup.saves_inside or self.ends_window(place)

    def ends_window(self, place: int) -> bool:
        """Return whether an update follows after so many requests."""
        return place % self.setup.requests_per_update == 0

    def name_at(self, place: int) -> str:
        """Return the number in the name of the checkpoint that is saved after so many requests."""
        return name_at(place, self.setup)


@dataclass(frozen=True)
class Rank:
    """The rank's own part in a training."""

    number: int
    journal: Journal
    injector: Injector
