"""Combinations, drawn at random."""

from __future__ import annotations

import random
from itertools import product

from requestzero.faults.combination import RANKS, UPDATES, Combination, Fault, FrontEnd, Point

_STAGES = (1, 2)
KINDS = tuple(product(FrontEnd, Point, Fault))
"""Every fault at every point of every front end."""


def draw(count: int, seed: int) -> list[Combination]:
    """Return ``count`` combinations: of the same seed, the same or the first of the same.

    Every fault at every point of every front end comes once, in random order, before one comes again. Stage, rank and
    moment are random.

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
    stage, rank, update = chance.choice(_STAGES), chance.randrange(RANKS), chance.randrange(2, UPDATES)
    return Combination(*kind, stage=stage, rank=rank, update=update)
