"""Ranks that do not do the same: the same clear error on all of them within seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support import rank_scenarios as scenarios
from support.rank_errors import assert_all_raise
from support.rank_scenarios import outcome
from support.ranks import RankError, RankGroup
from support.setup import AT_REQUEST_ENDS, Setup

both_stages = pytest.mark.parametrize("stage", [1, 2])


UNEVEN: list[tuple[Callable[..., None], int, str, str]] = [
    (scenarios.announced_unevenly, 1, "rank 0: begins request 'uneven' of 3", "rank 1: begins request 'uneven' of 2"),
    (scenarios.announced_unevenly, 2, "rank 0: begins request 'uneven' of 3", "rank 1: begins request 'uneven' of 2"),
    (scenarios.unannounced_unevenly, 1, "rank 0: steps after micro-batch 3", "rank 1: steps after micro-batch 2"),
    (scenarios.unannounced_unevenly, 2, "rank 0: reduces .* of micro-batch 3", "rank 1: steps after micro-batch 2"),
    (scenarios.fewer_than_announced, 1, "rank 0: steps after micro-batch 3", "rank 1: steps after micro-batch 2"),
    (scenarios.fewer_than_announced, 2, "rank 0: reduces .* of micro-batch 3", "rank 1: steps after micro-batch 2"),
]


@pytest.mark.parametrize(("scenario", "stage", "first", "second"), UNEVEN)
def test_three_against_two_micro_batches(
    two_fresh_ranks: RankGroup, scenario: Callable[..., None], stage: int, first: str, second: str
) -> None:
    assert_all_raise(two_fresh_ranks.run(outcome, scenario, setup=Setup(stage=stage)), first, second)


def test_where_a_request_is_checked_at_its_end(two_fresh_ranks: RankGroup) -> None:
    setup = Setup(config={"overflow": {"on_overflow": "drop_request", "check_grad_overflow": True}})
    outcomes = two_fresh_ranks.run(outcome, scenarios.unannounced_and_checked, setup=setup)
    assert_all_raise(outcomes, "rank 0: reduces .* of micro-batch 3", "rank 1: ends .* after micro-batch 2")


def test_within_seconds_with_the_intervals_that_users_have(two_fresh_ranks: RankGroup) -> None:
    outcomes = two_fresh_ranks.run(outcome, scenarios.unannounced_unevenly, poll_every=1.0)
    assert_all_raise(outcomes, "rank 1: steps", seconds=8.0)


ELSEWHERE: list[tuple[Callable[..., None], int, str, str]] = [
    (scenarios.other_names, 2, "rank 0: begins request 'name 0'", "rank 1: begins request 'name 1'"),
    (scenarios.one_steps, 2, "rank 0: begins request 'second'", "rank 1: steps after micro-batch 1 of .* 'first'"),
    (scenarios.one_has_no_data, 2, "rank 0: begins request 'second'", "rank 1: has no more data after .* 'first'"),
    (scenarios.loader_fails_between, 2, "rank 0: begins request 'second'", "rank 1: failed .*OSError: the disk is"),
    (scenarios.loader_fails_within, 1, "rank 0: reduces .* micro-batch 3", "rank 1: failed .*OSError: the disk is"),
    (scenarios.loader_fails_within, 2, "rank 0: reduces .* micro-batch 2", "rank 1: failed .*OSError: the disk is"),
    (
        scenarios.one_leaves_out,
        1,
        "rank 0: reduces",
        "rank 1: leaves micro-batch 1 .* out: training_step returned None",
    ),
    (
        scenarios.one_leaves_out,
        2,
        "rank 0: reduces",
        "rank 1: leaves micro-batch 1 .* out: training_step returned None",
    ),
    (scenarios.one_saves, 2, "rank 0: begins request 'second'", "rank 1: saves a checkpoint after .* 'first'"),
    (scenarios.one_loads, 2, "rank 0: begins request 'second'", "rank 1: loads a checkpoint after .* 'first'"),
    (
        scenarios.one_discards,
        2,
        "rank 0: begins request 'second' .* micro-batches in its update window: 1",
        "rank 1: begins request 'second' .* micro-batches in its update window: 0",
    ),
    (scenarios.one_begins_twice, 2, "rank 0: reduces .* micro-batch 2", "rank 1: failed .* the request before it is"),
]


@pytest.mark.parametrize(("scenario", "stage", "first", "second"), ELSEWHERE)
def test_ranks_that_are_elsewhere(
    two_fresh_ranks: RankGroup, scenario: Callable[..., None], stage: int, first: str, second: str
) -> None:
    setup = Setup(stage=stage, at=AT_REQUEST_ENDS[stage])
    assert_all_raise(two_fresh_ranks.run(outcome, scenario, setup=setup), first, second)


@both_stages
@pytest.mark.parametrize("from_the_first", [True, False])
@pytest.mark.parametrize("bucket", [500_000_000, 20])
def test_parameters_of_some_ranks_only(
    two_fresh_ranks: RankGroup, stage: int, from_the_first: bool, bucket: int
) -> None:
    setup = Setup(stage=stage, zero={"reduce_bucket_size": bucket})
    outcomes = two_fresh_ranks.run(outcome, scenarios.other_parameters, from_the_first, setup=setup)
    lines = [f"rank {i}: .* of request 'branches'.* part: .*layers.{n}.weight" for i, n in enumerate((1, 3))]
    assert_all_raise(outcomes, *lines, "set rank_dependent_parameters=true")


@pytest.mark.parametrize(
    ("scenario", "second"),
    [
        (scenarios.other_tags, "rank 1: loads a checkpoint after no request, tag 'step 1'"),
        (scenarios.other_latest_tags, "rank 1: loads a checkpoint after no request, tag 'step 1'"),
        (scenarios.one_has_no_checkpoint, "rank 1: loads a checkpoint after no request$"),
    ],
)
def test_ranks_that_load_other_tags(two_fresh_ranks: RankGroup, scenario: Callable[..., None], second: str) -> None:
    first = "rank 0: loads a checkpoint after no request, tag 'step 0'"
    outcomes = two_fresh_ranks.run(outcome, scenario)
    assert_all_raise(outcomes, first, f"(?m){second}", "the checkpoint of one tag")


def test_stock_pairs_other_parameters_or_aborts(two_fresh_ranks: RankGroup) -> None:
    """Why it matters: equal sizes are added up silently, into a layer that another rank has not used."""
    applied: Any = two_fresh_ranks.run(scenarios.stock_pairs, True)
    assert applied[0] == applied[1] != [1.0, 2.0]  # what each rank's own layer should get: half of 2, and of 4
    with pytest.raises(RankError, match="died"):
        two_fresh_ranks.run(scenarios.stock_pairs, False, timeout=30.0)
