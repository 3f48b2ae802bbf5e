"""Rank groups for the whole session: starting a rank costs seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.ranks import RankGroup

# What DeepSpeed compiles on first use (DeepSpeedCPUAdam) is kept beside the checkout: two environments that share one
# folder rebuild each other's. A build that was killed leaves its lock behind, on which the next one waits without end.
COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "torch_extensions"
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(COMPILED))
for lock in COMPILED.glob("*/lock"):
    if time.time() - lock.stat().st_mtime > 600:
        lock.unlink()


@pytest.fixture(scope="session")
def group_of() -> Iterator[Callable[[int], RankGroup]]:
    """Of a number of ranks, their group: it starts when it is first used."""
    groups: dict[int, RankGroup] = {}
    yield lambda ranks: groups.setdefault(ranks, RankGroup(ranks))
    for group in groups.values():
        group.stop()


@pytest.fixture(scope="session")
def one_rank(group_of: Callable[[int], RankGroup]) -> RankGroup:
    return group_of(1)


@pytest.fixture(scope="session")
def two_ranks(group_of: Callable[[int], RankGroup]) -> RankGroup:
    return group_of(2)


@pytest.fixture(scope="session")
def three_ranks(group_of: Callable[[int], RankGroup]) -> RankGroup:
    return group_of(3)


@pytest.fixture(scope="session")
def four_ranks(group_of: Callable[[int], RankGroup]) -> RankGroup:
    return group_of(4)
