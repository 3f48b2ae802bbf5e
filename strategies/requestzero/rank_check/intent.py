"""The next action of a rank, as integers to compare and as text to read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """Kinds of intents; those that are only reported are waits, which no comparison precedes."""

    REQUEST = 1
    """Begins a request."""
    MICRO_BATCH = 2
    """Runs a backward that was not announced."""
    SKIP = 3
    """Leaves a micro-batch out."""
    ORDER = 4
    """Reduces gradients in another order than before."""
    REDUCTION = 5
    """Waits in a gradient reduction (only reported)."""
    STEP = 6
    """Steps, which was not announced."""
    APPLY = 7
    """Waits within the step (only reported)."""
    BATCH = 8
    """Waits before a batch (only reported)."""
    END_OF_DATA = 9
    """Has no more data."""
    FAILURE = 10
    """Cannot go on."""
    DESTROYED = 11
    """Has destroyed its engine (only reported)."""
    REQUEST_END = 12
    """Ends a request whose number of micro-batches was not announced, where that is collective."""
    FINITE_CHECK = 13
    """Waits at a request's end, where its gradient is checked (only reported)."""
    CHECKPOINT = 14
    """Saves or loads a checkpoint."""
    FORWARD = 15
    """Runs a forward that was not announced, where that is collective."""
    EVALUATION = 16
    """Runs a forward without gradients, where that is collective."""
    GATHER = 17
    """Waits in such a forward (only reported)."""
    COLLECTIVE = 18
    """Waits in a collective of the training loop's."""
    FILES = 19
    """Waits within a save or a load (only reported)."""
    READY = 20
    """Runs the next backward of its request, or ends the block of it, unless another rank aborts it."""
    ABORT = 21
    """Aborts its request."""


VOTES = (Kind.READY, Kind.ABORT)
"""Ranks that vote agree where they do so on the same request, which is aborted if one of them wants that."""


NUMBERS = 5
"""Number of integers of an intent."""


@dataclass(frozen=True)
class Intent:
    """One rank's next action and how far it has come. Ranks agree where :meth:`numbers` are equal."""

    kind: Kind
    request: int
    """Requests begun so far."""
    micro_batch: int
    """Micro-batches of that request that are done."""
    window: int
    """Micro-batches of the open update window."""
    announced: tuple[int, ...] = ()
    """The announced properties of the request, as numbers."""
    content: str = ""
    """Anything else that has to be equal."""
    text: str = ""
    """For the error message; not compared."""

    def numbers(self) -> list[int]:
        """Return ``NUMBERS`` integers that fit into int64, as do their negatives."""
        compared = (self.announced, self.content)
        return [self.kind, self.request, self.micro_batch, self.window, _hash(repr(compared))]

    def place(self) -> list[int]:
        """Return numbers that are equal for ranks that may wait for one thing, or for neighbouring parts of it."""
        return [self.kind, self.request, self.micro_batch]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
