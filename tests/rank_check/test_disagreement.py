"""Ranks that do not do the same: the same clear error on all of them within seconds, and nothing where they do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import rank_scenarios as scenarios
from support.rank_scenarios import Outcome, outcome
from support.ranks import RankError, RankGroup
from support.setup import AT_REQUEST_ENDS, Setup

both_stages = pytest.mark.parametrize("stage", [1, 2])


def assert_all_raise(outcomes: list[Outcome], *lines: str, seconds: float = 5.0) -> None:
    """The same RankDisagreementError on all ranks, with these lines (patterns), in time, and again on further use."""
    assert {each.error for each in outcomes} == {"RankDisagreementError"}, outcomes
    assert len({each.text for each in outcomes}) == 1, outcomes
    for line in lines:
        assert re.search(line, outcomes[0].text), outcomes[0].text
    assert all(each.again == each.text for each in outcomes)
    assert max(each.seconds for each in outcomes) < seconds


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


def test_a_rank_that_is_gone(two_fresh_ranks: RankGroup) -> None:
    survivor, gone = two_fresh_ranks.run(outcome, scenarios.one_destroys)
    assert gone.error == "SystemError"
    assert survivor.error == "RankDisagreementError"
    assert "rank 1: has destroyed its engine" in survivor.text


def test_a_rank_that_dies(two_fresh_ranks: RankGroup) -> None:
    with pytest.raises(RankError, match=r"RankDisagreementError: The connection to a data-parallel rank was lost \("):
        two_fresh_ranks.run(scenarios.one_dies, timeout=30.0)


@pytest.mark.parametrize(
    "setup", [Setup(stage=1), Setup(stage=2), Setup(stage=3), Setup(stage=2, offload=True)], ids=str
)
def test_an_optimizer_that_raises_on_one_rank(two_fresh_ranks: RankGroup, setup: Setup) -> None:
    outcomes = two_fresh_ranks.run(outcome, scenarios.one_fails_in_its_step, setup=setup, timeout=60.0)
    assert_all_raise(outcomes, "rank 0: steps after", "rank 1: failed .*OSError: the disk is gone")


def test_an_optimizer_that_raises_on_all_ranks(two_ranks: RankGroup) -> None:
    outcomes = two_ranks.run(outcome, scenarios.all_fail_in_their_step)
    assert [(each.error, each.text) for each in outcomes] == [("OSError", "the disk is gone")] * 2


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_that_one_rank_cannot_write(two_fresh_ranks: RankGroup, stage: int, tmp_path: Path) -> None:
    setup, scenario = Setup(stage=stage), scenarios.one_fails_in_its_save
    outcomes = two_fresh_ranks.run(outcome, scenario, str(tmp_path), setup=setup, timeout=60.0)
    assert_all_raise(outcomes, "rank 0: saves a checkpoint", "rank 1: failed .*OSError: the disk is gone")
    assert not (tmp_path / "latest").exists()


def test_a_checkpoint_that_one_rank_cannot_read(two_fresh_ranks: RankGroup, tmp_path: Path) -> None:
    outcomes = two_fresh_ranks.run(outcome, scenarios.one_fails_in_its_load, str(tmp_path), timeout=60.0)
    assert_all_raise(outcomes, "rank 1: failed .*OSError: the disk is gone")


def test_a_checkpoint_with_a_changed_bit(two_fresh_ranks: RankGroup, tmp_path: Path) -> None:
    """Which DeepSpeed and PyTorch would load."""
    outcomes = two_fresh_ranks.run(outcome, scenarios.one_file_is_damaged, str(tmp_path), timeout=60.0)
    assert {each.error for each in outcomes} == {"ValueError"}, outcomes
    for each in outcomes:
        assert re.search("rank_1_.*optim_states.pt is damaged .the checksum of .*data", each.text), outcomes


def test_engines_in_crossed_order(two_fresh_ranks: RankGroup) -> None:
    """The error is that of the engine in which a rank waits."""
    outcomes = two_fresh_ranks.run(outcome, scenarios.crossed_engines, timeout=60.0)
    assert [each.error for each in outcomes] == ["RankDisagreementError"] * 2, outcomes
    assert outcomes[0].text == outcomes[1].text
    for line in [f"rank {rank}: begins request 'crossed'.* .engine {rank + 1} of these ranks." for rank in range(2)]:
        assert re.search(line, outcomes[0].text), outcomes[0].text
    assert "use their engines in the same order" in outcomes[0].text


def test_engines_in_the_same_order_wait_for_each_other(two_ranks: RankGroup) -> None:
    assert two_ranks.run(scenarios.slow_engines) == [3, 3]


def test_the_longest_wait_is_that_of_the_users_process_group(two_ranks: RankGroup) -> None:
    for given, longest in two_ranks.run(scenarios.timeouts):
        assert given == longest


def test_a_failure_that_others_hear_late(two_fresh_ranks: RankGroup) -> None:
    outcomes = two_fresh_ranks.run(outcome, scenarios.others_do_not_hear)
    assert_all_raise(outcomes, "rank 0: has not said", "rank 1: failed .*OSError: the disk is gone", seconds=8.0)


@both_stages
def test_what_all_ranks_do_alike_is_allowed(two_ranks: RankGroup, stage: int) -> None:
    outcomes = two_ranks.run(outcome, scenarios.all_change, setup=Setup(stage=stage))
    assert [each.error for each in outcomes] == ["", ""], outcomes


def test_a_slow_rank_is_waited_for(two_ranks: RankGroup) -> None:
    outcomes = two_ranks.run(outcome, scenarios.one_is_slow)
    assert [each.error for each in outcomes] == ["", ""], outcomes
    assert min(each.seconds for each in outcomes) > 5.0


def test_an_error_of_all_ranks_stays_what_it_is(two_ranks: RankGroup) -> None:
    outcomes = two_ranks.run(outcome, scenarios.all_fail)
    assert [(each.error, each.text) for each in outcomes] == [("KeyError", f"'on rank {i}'") for i in range(2)]


@both_stages
def test_one_agreement_per_announced_request(two_ranks: RankGroup, stage: int) -> None:
    assert two_ranks.run(scenarios.rounds_of, Setup(stage=stage), 3) == [(3, 6)] * 2


def test_engines_leave_nothing_behind(two_ranks: RankGroup) -> None:
    assert two_ranks.run(scenarios.left_behind, 3) == [(0, 0)] * 2


def test_agreement_off(two_ranks: RankGroup) -> None:
    assert two_ranks.run(scenarios.without_agreement) == [True, True]


def test_one_rank_has_nobody_to_agree_with(one_rank: RankGroup) -> None:
    (result,) = one_rank.run(outcome, scenarios.all_change)
    assert result.error == ""


def test_stock_pairs_other_parameters_or_aborts(two_fresh_ranks: RankGroup) -> None:
    """Why it matters: equal sizes are added up silently, into a layer that another rank has not used."""
    applied: Any = two_fresh_ranks.run(scenarios.stock_pairs, True)
    assert applied[0] == applied[1] != [1.0, 2.0]  # what each rank's own layer should get: half of 2, and of 4
    with pytest.raises(RankError, match="died"):
        two_fresh_ranks.run(scenarios.stock_pairs, False, timeout=30.0)
