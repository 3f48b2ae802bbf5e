"""ZeRO 3, whose forward is collective: ranks that part before it or in it raise the same error, in seconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from support import rank_scenarios as scenarios
from support.engines import build
from support.rank_scenarios import Outcome, outcome, rank, request, step
from support.ranks import RankGroup
from support.setup import Setup
from support.stage_3 import GATHERED
from support.windows import ALL, Micro, backward, inputs_of

STAGE_3 = Setup(stage=3, zero={**GATHERED, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0})
"""Every module gathers its weights when it runs, and not before."""


def evaluate(engine: Any, times: int) -> None:
    with torch.no_grad():
        for _ in range(times):
            engine(*inputs_of(engine, 0), ALL)


def one_more_evaluation(engine: Any) -> None:
    request(engine, 1, "first")
    step(engine)
    evaluate(engine, 2 + rank())
    request(engine, 1, "second")


def one_evaluates_within_a_request(engine: Any) -> None:
    """The other one is in forwards that were announced, and gathers weights."""
    engine.begin_request("long", micro_batches=2)
    backward(engine, Micro(ALL, 0, False))
    evaluate(engine, rank())
    backward(engine, Micro(ALL, 1))


def fails_in_the_forward(engine: Any) -> None:
    """The other one waits in a gather of a forward that was announced."""

    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    with engine.data_pass():
        request(engine, 1, "first")
        step(engine)
        if rank() == 1:
            engine.module.layers[2].register_forward_pre_hook(fail)
        request(engine, 1, "second")


def fails_in_the_backward(engine: Any) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    with engine.data_pass():
        request(engine, 1, "first")
        if rank() == 1:
            engine.module.layers[2].weight.register_hook(fail)
        request(engine, 1, "second")


CASES: list[tuple[Callable[..., None], str, str]] = [
    (scenarios.announced_unevenly, "rank 0: begins request 'uneven' of 3", "rank 1: begins request 'uneven' of 2"),
    (scenarios.unannounced_unevenly, "rank 0: runs forward 3 of", "rank 1: steps after micro-batch 2"),
    (scenarios.fewer_than_announced, "rank 0: runs forward 3 of", "rank 1: steps after micro-batch 2"),
    (scenarios.one_has_no_data, "rank 0: begins request 'second'", "rank 1: has no more data after .* 'first'"),
    (scenarios.loader_fails_within, "rank 0: runs forward 2 of", "rank 1: failed .*OSError: the disk is"),
    (scenarios.one_leaves_out, "rank 0: runs forward 1 of", "rank 1: leaves micro-batch 1 .* out: training_step"),
    (one_more_evaluation, "rank 0: begins request 'second'", "rank 1: runs a forward without gradients after"),
    (one_evaluates_within_a_request, "rank 0: runs forward 2 of", "rank 1: runs a forward without gradients"),
    (fails_in_the_forward, "rank 0: runs forward 1 of", "rank 1: failed .*OSError: the disk is gone"),
    # Rank 0 waits for the next gather of its backward, which belongs to the forward, or for its reduction.
    (
        fails_in_the_backward,
        "rank 0: (runs forward 1 of|reduces the gradients)",
        "rank 1: failed .*OSError: the disk is gone",
    ),
]


def assert_all_raise(outcomes: list[Outcome], *lines: str) -> None:
    assert {each.error for each in outcomes} == {"RankDisagreementError"}, outcomes
    assert len({each.text for each in outcomes}) == 1, outcomes
    for line in lines:
        assert re.search(line, outcomes[0].text), outcomes[0].text
    assert all(each.again == each.text for each in outcomes)
    assert max(each.seconds for each in outcomes) < 10.0


@pytest.mark.parametrize(("scenario", "first", "second"), CASES)
def test_ranks_that_part(two_fresh_ranks: RankGroup, scenario: Callable[..., None], first: str, second: str) -> None:
    assert_all_raise(two_fresh_ranks.run(outcome, scenario, setup=STAGE_3), first, second)


def rounds(announced: bool) -> tuple[int, int, int]:
    """Agreements of three requests of two micro-batches, of three evaluations, and of three steps.

    After a first window, in which the ranks agree on the order of reduction, once for the engine.
    """
    engine = build(STAGE_3)
    backward(engine, Micro(ALL, 0))
    step(engine)
    channel = engine.agreement._channel
    counts = []
    for part in range(3):
        before = channel.rounds
        for _ in range(3):
            if part == 0:
                request(engine, 2, announced=None if announced else False, window_end=False)
            elif part == 1:
                evaluate(engine, 1)
            else:
                backward(engine, Micro(ALL, 0))
                step(engine)
        counts.append(channel.rounds - before)
    engine.destroy()
    return counts[0], counts[1], counts[2]


def test_announced_forwards_ride_along(two_ranks: RankGroup) -> None:
    """One agreement for each announced request; else one for each forward, and one for each step."""
    assert two_ranks.run(rounds, True) == [(3, 3, 6)] * 2
    assert two_ranks.run(rounds, False) == [(6, 3, 6)] * 2


def all_alike(engine: Any) -> None:
    evaluate(engine, 1)
    engine.begin_request("a", micro_batches=2, window_end=True)
    backward(engine, Micro(ALL, 0, False))
    evaluate(engine, 2)
    backward(engine, Micro(ALL, 1))
    step(engine)
    request(engine, 2, announced=False)
    step(engine)
    engine.end_data()


@pytest.mark.parametrize("agreement", [True, False])
def test_what_all_ranks_do_alike_is_allowed(two_ranks: RankGroup, agreement: bool) -> None:
    setup = replace(STAGE_3, config={"requestzero": {"rank_agreement": agreement}})
    assert [each.error for each in two_ranks.run(outcome, all_alike, setup=setup)] == ["", ""]
