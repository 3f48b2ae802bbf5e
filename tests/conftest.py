"""Rank groups for the whole session: starting a rank costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import RankGroup


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
