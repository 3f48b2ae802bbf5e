"""A ``training_step`` that aborts its request."""

from __future__ import annotations

from typing import Any

import pytest

from support.failures import failure
from support.lightning_data import MARKED
from support.lightning_reference import reference
from support.lightning_runs import train
from support.lightning_spec import Run
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER


def run_of(**fields: Any) -> Run:
    options = {"abort": True, "config": KEEP_OPTIMIZER, **fields.pop("options", {})}
    return Run(options=options, **fields)


@pytest.mark.parametrize(
    ("aborts_by", "rank", "stage", "options"),
    [
        ("raise", None, 2, {"offload_optimizer": True}),
        ("return", None, 1, {}),
        ("raise", 1, 2, {"offload_optimizer": True}),
        ("return", 0, 1, {}),
        ("raise", 1, 2, {"reduce_gradients_at": "auto"}),
        ("raise", None, 3, {}),
        ("raise", 1, 3, {"offload_optimizer": True}),
        ("return", 0, 3, {}),
    ],
)
def test_the_others_of_a_window_are_applied(
    two_ranks: RankGroup, aborts_by: str, rank: int | None, stage: int, options: dict[str, Any]
) -> None:
    """Of windows 2 and 3 a request is aborted, of window 4 both are: nothing is applied, and the schedule waits."""
    run = run_of(
        options={"stage": stage, **options},
        trainer={"accumulate": 2},
        aborted_batches=(2, 5, 6, 7),
        aborts_by=aborts_by,
        aborting_rank=rank,
    )
    for got in two_ranks.run(train, run):
        assert [row["weights"] for row in got["updates"]] == reference([[0, 1], [3], [4], [], [8, 9], [10, 11]])
        assert [row["lr"] for row in got["updates"]] == [0.5, 0.25, 0.25, 0.25, 0.125, 0.125]
        assert (got["applied"], got["attempted"], got["aborted"], got["open"]) == (5, 5, 4, False)
        if got["rank"] == 0:
            assert [row["requests/aborted"] for _, row in got["logged"]][-1] == 4
            assert not [text for text in got["warnings"] if "returned `None`" in text]


def test_the_rest_of_an_aborted_request_is_left_out(two_ranks: RankGroup) -> None:
    """One request is aborted at its last batch, one at its second of three, which ends the window."""
    run = run_of(marks=MARKED, batches=len(MARKED), aborted_batches=(1, 4), aborting_rank=1)
    for got in two_ranks.run(train, run):
        assert [row["weights"] for row in got["updates"]] == reference([[2], [], [6]])
        assert [index for _, index in got["seen"]] == [0, 1, 2, 3, 4, 6]
        assert got["aborted"] == 2


@pytest.mark.parametrize(
    ("aborts_by", "rank", "stage", "windows"),
    [
        ("raise", None, 2, [[1, 2], [3, 5]]),
        ("late", None, 2, [[1, 2], [3, 5]]),
        ("raise", 0, 2, [[1, 2], [3, 5]]),
        ("raise", 1, 3, [[1, 2], [3, 5]]),
    ],
)
def test_manual_optimization(
    two_ranks: RankGroup, aborts_by: str, rank: int | None, stage: int, windows: list[list[int]]
) -> None:
    aborted = tuple(sorted(set(range(6)) - set(windows[0] + windows[1])))
    run = run_of(
        options={"stage": stage},
        manual="every_third",
        batches=6,
        schedule=False,
        aborted_batches=aborted,
        aborts_by=aborts_by,
        aborting_rank=rank,
    )
    for got in two_ranks.run(train, run):
        assert [row["weights"] for row in got["updates"]] == reference(windows)
        assert got["aborted"] == 2


def test_an_abort_that_is_not_possible_ends_the_run(two_ranks: RankGroup) -> None:
    run = run_of(options={"abort": False}, manual="every_third", aborted_batches=(1,), aborts_by="late")
    for text in two_ranks.run(failure, train, run):
        assert "abort_request('late') is not possible" in text
        assert "set the option abort" in text
