"""A fault, and where it is injected."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from requestzero.faults.places import describe
from requestzero.faults.setup import Setup

RANKS = 2
UPDATES = 4
"""Updates of a whole run; a checkpoint is saved at least after each."""


class FrontEnd(Enum):
    """What the training loop is written for."""

    ENGINE = "engine"
    LIGHTNING = "Lightning"
    ACCELERATE = "Accelerate"


class Point(Enum):
    """The place of a training at which a fault is injected, on one rank."""

    LOADER = "loader"
    """While the next micro-batch, or request, is made."""
    FORWARD = "forward"
    """In the model's forward; with Lightning in ``training_step``."""
    VOTE = "before the agreement"
    """Before the rank announces its request to the others."""
    BACKWARD = "inside backward"
    """In a node of the graph, between the gradients of two layers."""
    BOUNDARY = "at a boundary"
    """Where the end of a request is marked."""
    ABORT = "in an abort"
    """Where the rank calls ``engine.abort_request``, or the front end does for it."""
    STEP = "in step"
    """In the user's optimizer, before it has changed this rank's partition."""
    SAVE = "in a save"
    """While this rank writes its first file of a checkpoint; within a window, its file of the sums."""
    LOAD = "in a load"
    """While this rank reads its first file of a checkpoint."""


class Fault(Enum):
    """What happens there."""

    RAISE = "raises"
    NONE = "returns None"
    """Without doing what belongs to the point: no inputs, no loss, no announcement, no gradient, no mark, no
    ``engine.abort_request``, ``step``, ``save_checkpoint`` or ``load_checkpoint`` on this rank."""
    SLEEP = "sleeps"
    KILL = "kill -9"
    TERM = "SIGTERM"
    STOP = "SIGSTOP"
    DISK_FULL = "disk full"
    """From here on every file that this rank writes ends in ENOSPC, half written."""
    CUT = "cuts a checkpoint file"
    """To half its size, in the newest checkpoint; then the process is killed, or, in a load, reads it."""
    CHANGED = "changes a checkpoint file"
    """By one bit within its tensors; then likewise."""


DAMAGES = (Fault.CUT, Fault.CHANGED)
ENDS_PROCESS = (Fault.KILL, Fault.TERM, Fault.STOP)


@dataclass(frozen=True)
class Combination:
    """One fault in one training."""

    front_end: FrontEnd
    point: Point
    fault: Fault
    setup: Setup
    """The training."""
    rank: int
    """The one that meets the fault."""
    update: int
    """Updates that are done when it does: at least 2, so that there are checkpoints."""
    request: int = 0
    """Requests of the next update that are done too."""

    @property
    def place(self) -> int:
        """Requests that have come when the fault may happen."""
        return self.update * self.setup.requests_per_update + self.request

    @property
    def saves_window(self) -> bool:
        """True if the first checkpoint from then on is one within a window."""
        return self.setup.saves_inside and self.request > 0

    @property
    def omits_gradient(self) -> bool:
        """True if the update may go on without the gradient that is ``None``, as for a parameter that takes no part.

        At stage 2 every backward reduces, so that ranks disagree; and an aborted request leaves nothing behind.
        """
        omits = self.point is Point.BACKWARD and self.fault is Fault.NONE and self.setup.stage != 2
        return omits and self.setup.aborted_request(self.update) != self.request

    def in_reference(self) -> Combination:
        """Return the same fault in a loop over an engine, in which nothing is aborted, nor saved within a window."""
        aborted = self.setup.aborted_request(self.update)
        later = aborted is not None and aborted < self.request
        setup = self.setup.reference()
        return replace(self, front_end=FrontEnd.ENGINE, setup=setup, request=self.request - later)

    @property
    def damages(self) -> bool:
        """True if it damages a checkpoint."""
        return self.fault in DAMAGES

    @property
    def ends_process(self) -> bool:
        """True if the rank cannot say anything any more."""
        return self.fault in ENDS_PROCESS or (self.damages and self.point is not Point.LOAD)

    def __str__(self) -> str:
        return (
            f"{self.front_end.value}, {self.setup}: {self.point.value}, {self.fault.value}, "
            f"rank {self.rank}, after {describe(self.place, self.setup)}"
        )
