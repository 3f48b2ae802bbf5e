"""Combinations, drawn at random."""

from __future__ import annotations

import random
from itertools import product

from requestzero.faults.combination import RANKS, UPDATES, Combination, Fault, FrontEnd, Point
from requestzero.faults.setup import Precision, Setup

_STAGES = (1, 2, 3)
_MEMORY = (
    (False, Precision.FP32),
    (False, Precision.BF16),
    (True, Precision.FP32),
    (True, Precision.BF16_FP32_SUMS),
)
"""The optimizer on the CPU or not, and the dtypes: a run for comparison is made of each at each stage."""
KINDS = tuple(product(FrontEnd, Point, Fault))
"""Every fault at every point of every front end."""


def draw(count: int, seed: int) -> list[Combination]:
    """Return ``count`` combinations: of the same seed, the same or the first of the same.

    Every fault at every point of every front end comes once, in random order, before one comes again. The training
    (stage, offload, dtypes, saves within windows, aborted requests), rank and moment are random.

    Args:
        count: at least 1.
        seed: any integer.
    """
    order, chance = random.Random(seed), random.Random(f"{seed} in detail")
    kinds: list[tuple[FrontEnd, Point, Fault]] = []
    while len(kinds) < count:
        kinds += order.sample(KINDS, len(KINDS))
    return [_complete(kind, chance) for kind in kinds[:count]]


def _complete(kind: tuple[FrontEnd, Point, Fault], chance: random.Random) -> Combination:
    setup = _setup(kind[1], chance)
    rank, update = chance.randrange(RANKS), chance.randrange(2, UPDATES)
    return Combination(*kind, setup=setup, rank=rank, update=update, request=_request(kind[1], setup, chance))


def _setup(point: Point, chance: random.Random) -> Setup:
    offload, precision = chance.choice(_MEMORY)
    aborts = chance.choice((False, True)) or point is Point.ABORT
    return Setup(chance.choice(_STAGES), offload, precision, saves_inside=chance.choice((False, True)), aborts=aborts)


def _request(point: Point, setup: Setup, chance: random.Random) -> int:
    """Return after which request of a window the fault comes: the first where it might not come at all after others."""
    request = chance.randrange(setup.requests_per_update)
    at_once = point in (Point.LOADER, Point.ABORT)  # loaders are ahead; one request of a window is aborted
    at_update = point in (Point.SAVE, Point.LOAD) and not setup.saves_inside
    return 0 if at_once or at_update else request
