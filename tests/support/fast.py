"""A cut through all tests for the inner loop: some quick functions of every file, with one of their parameter sets."""

from __future__ import annotations

import zlib
from itertools import groupby

import pytest

from support.covering import function_of, without

PER_FILE = 3
"""Functions of a file that are kept at most, so that the cut stays short while files grow."""


def fast_cut(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items to run and the others.

    A function's parameter set is drawn by its name, so that all runs agree, and functions with the same parameters
    get different ones. Of a file with many functions every n-th is kept.
    """
    kept = [item for _, group in groupby(items, key=_file) for item in _evenly(_one_set_of_each(list(group)), PER_FILE)]
    return kept, without(items, kept)


def _one_set_of_each(items: list[pytest.Item]) -> list[pytest.Item]:
    kept: list[pytest.Item] = []
    for function, group in groupby(items, key=function_of):
        sets = [item for item in group if item.get_closest_marker("slow") is None]
        if sets:
            kept.append(sets[zlib.crc32(function.encode()) % len(sets)])
    return kept


def _evenly(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    if len(items) <= count:
        return items
    return [items[place * len(items) // count] for place in range(count)]


def _file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]
