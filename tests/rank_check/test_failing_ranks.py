"""A rank that raises, cannot read or write, or dies: the others learn it within seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import rank_scenarios as scenarios
from support.rank_errors import assert_all_raise
from support.rank_scenarios import outcome
from support.ranks import RankError, RankGroup
from support.setup import Setup


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


def test_a_failure_that_others_hear_late(two_fresh_ranks: RankGroup) -> None:
    outcomes = two_fresh_ranks.run(outcome, scenarios.others_do_not_hear)
    assert_all_raise(outcomes, "rank 0: has not said", "rank 1: failed .*OSError: the disk is gone", seconds=8.0)


def test_an_error_of_all_ranks_stays_what_it_is(two_ranks: RankGroup) -> None:
    outcomes = two_ranks.run(outcome, scenarios.all_fail)
    assert [(each.error, each.text) for each in outcomes] == [("KeyError", f"'on rank {i}'") for i in range(2)]
