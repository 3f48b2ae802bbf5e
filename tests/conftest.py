"""Rank groups for the whole session: starting a rank costs seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
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


def _group(world_size: int) -> Iterator[RankGroup]:
    group = RankGroup(world_size)
    yield group
    group.stop()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankGroup]:
    yield from _group(1)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankGroup]:
    yield from _group(2)


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankGroup]:
    yield from _group(3)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankGroup]:
    yield from _group(4)
