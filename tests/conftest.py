"""Rank groups for the whole session, since starting a rank costs seconds; and what is compiled before it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from support.covering import cover_pairs
from support.cpu_adam import compile_before_tests
from support.fast import fast_cut
from support.paths import ROOT
from support.ranks import RankGroup

# Beside the checkout: two environments that share one folder rebuild each other's extensions.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".pytest_cache" / "torch_extensions"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="a few tests of every file, none that is marked as slow")
    parser.addoption("--all-combinations", action="store_true", help="all sets of parameters, not only all pairs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-combinations"):
        items[:], others = cover_pairs(items)
        config.hook.pytest_deselected(items=others)
    if config.getoption("--fast"):
        items[:], others = fast_cut(items)
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile before xdist starts its workers, and before any test."""
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker and not session.config.option.collectonly:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        compile_before_tests(reporter.write_line if reporter else print)


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
