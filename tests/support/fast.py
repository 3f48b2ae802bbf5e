"""A cut through all tests for the inner loop: every test function that is quick, with one of its parameter sets."""

from __future__ import annotations

import zlib
from itertools import groupby

import pytest


def fast_cut(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items to run and the others.

    A function's parameter set is drawn by its name, so that all runs agree, and functions with the same parameters
    get different ones.
    """
    kept: list[pytest.Item] = []
    for function, group in groupby(items, key=_function):
        sets = [item for item in group if item.get_closest_marker("slow") is None]
        if sets:
            kept.append(sets[zlib.crc32(function.encode()) % len(sets)])
    return kept, [item for item in items if item not in kept]


def _function(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]
