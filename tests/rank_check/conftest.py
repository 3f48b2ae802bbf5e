"""Ranks that a test may leave in a collective that nobody completes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ranks import RankGroup


@pytest.fixture
def two_fresh_ranks() -> Iterator[RankGroup]:
    """Two ranks of this test alone."""
    group = RankGroup(2)
    yield group
    group.stop()
