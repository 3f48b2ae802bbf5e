"""Engines that wait for slower ranks, in the same order or crossed; and what an agreement costs and leaves."""

from __future__ import annotations

import re

import pytest

from support import rank_scenarios as scenarios
from support.rank_scenarios import outcome
from support.ranks import RankGroup
from support.setup import Setup

both_stages = pytest.mark.parametrize("stage", [1, 2])


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


@both_stages
def test_what_all_ranks_do_alike_is_allowed(two_ranks: RankGroup, stage: int) -> None:
    outcomes = two_ranks.run(outcome, scenarios.all_change, setup=Setup(stage=stage))
    assert [each.error for each in outcomes] == ["", ""], outcomes


def test_a_slow_rank_is_waited_for(two_ranks: RankGroup) -> None:
    outcomes = two_ranks.run(outcome, scenarios.one_is_slow)
    assert [each.error for each in outcomes] == ["", ""], outcomes
    assert min(each.seconds for each in outcomes) > 5.0


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
