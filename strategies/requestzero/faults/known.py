"""Combinations that are known not to hold, with the reason."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from requestzero.faults.combination import Combination, Fault, FrontEnd, Point


@dataclass(frozen=True)
class Known:
    """Combinations that do not hold for one reason."""

    points: Collection[Point]
    faults: Collection[Fault]
    front_ends: Collection[FrontEnd]
    stages: Collection[int]
    text: str
    """In everything that does not hold then."""
    reason: str


KNOWN: tuple[Known, ...] = (
    Known(
        points=(Point.BACKWARD,),
        faults=(Fault.NONE,),
        front_ends=tuple(FrontEnd),
        stages=(1, 3),
        text="has applied another update",
        reason=(
            "At stage 1 gradients are first added up on their rank, and at stage 3 DeepSpeed's autograd functions make "
            "zeros of those that are missing: nobody can tell them from others."
        ),
    ),
)


def reason(combination: Combination, broken: Collection[str]) -> str | None:
    """Return why a combination is known not to hold in this way; ``None`` where it has to.

    Args:
        combination: of training and fault.
        broken: what did not hold.
    """
    for known in KNOWN:
        of_kind = combination.point in known.points and combination.fault in known.faults
        of_kind = of_kind and combination.front_end in known.front_ends and combination.setup.stage in known.stages
        if of_kind and all(known.text in each for each in broken):
            return known.reason
    return None
