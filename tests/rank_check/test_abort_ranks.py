"""A request that one rank aborts: all ranks learn of it before they reduce."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from support.engines import build, masters
from support.logs import logged_by
from support.rank_scenarios import outcome
from support.ranks import RankError, RankGroup
from support.setup import Setup
from support.stage_3 import GATHERED, PARAMS
from support.updates import assert_sums, difference
from support.windows import ALL, Micro, backward, values

ABORT = {"requestzero": {"abort": True}}


def one_rank_fails(setup: Setup, place: str, rank: int, micro_batches: int | None = 2) -> tuple[list[str], str]:
    """The second request fails on one rank; returns the log, and what has left the block there."""
    import deepspeed.comm as dist

    engine = build(setup)
    start, raised = masters(engine), ""
    with logged_by("requestzero") as messages:
        for number in range(3):
            try:
                with engine.request(f"r{number}", micro_batches=micro_batches):
                    run_micro_batches(engine, number, place if number == 1 and dist.get_rank() == rank else "")
            except KeyError as error:
                raised = str(error)
    engine.step()
    assert_sums(difference(start, masters(engine)), [Micro(ALL, seed) for seed in (0, 10, 2, 12)])
    assert engine.aborted_requests == 1
    start = masters(engine)
    for seed in (3, 4):
        backward(engine, Micro(ALL, seed))
    engine.step()
    assert_sums(difference(start, masters(engine)), [Micro(ALL, seed) for seed in (3, 4)])
    engine.destroy()
    return messages, raised


def run_micro_batches(engine: Any, number: int, place: str) -> None:
    for part in range(2):
        if place == f"data {part}":
            raise KeyError("no data")
        with failing_in(engine, place if place.endswith(f" {part}") else ""):
            backward(engine, Micro(ALL, number + 10 * part, request_end=False))
    if place == "end":
        raise KeyError("too late")


def failing_in(engine: Any, place: str) -> AbstractContextManager[Any]:
    """In the model's forward before its first layer, in its third layer's, or between the forward and the backward."""
    name = place.partition(" ")[0]
    calls = {
        "model": (engine.module, "forward"),
        "layer": (engine.module.layers[2], "forward"),
        "loss": (engine, "backward"),
    }
    return patch.object(*calls[name], side_effect=KeyError(f"no {name}")) if name in calls else nullcontext()


SETUPS = [
    Setup(config=ABORT),
    Setup(stage=1, config=ABORT),
    Setup(offload=True, model="bf16", config=ABORT),
    Setup(config={"requestzero": {"abort": True, "reduce_gradients_at": "auto"}}),  # compares free memory as well
    Setup(stage=3, model="bf16", zero=GATHERED, config=ABORT),
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize(
    ("place", "rank"), [("data 0", 1), ("data 1", 0), ("layer 0", 1), ("loss 1", 0), ("loss 0", 1), ("end", 1)]
)
def test_a_failure_on_one_rank_aborts_the_request_on_all(
    two_ranks: RankGroup, setup: Setup, place: str, rank: int
) -> None:
    assert_aborted(two_ranks.run(one_rank_fails, setup, place, rank), place, rank)


def assert_aborted(results: list[tuple[list[str], str]], place: str, rank: int) -> None:
    text = "'too late'" if place == "end" else f"'no {place.partition(' ')[0]}'"
    assert [raised for _, raised in results] == [text if each == rank else "" for each in (0, 1)]
    assert results[0][0] == [f"Aborted request 'r1': left out of update 1 (rank {rank}: KeyError: {text})."]


STAGE_3 = [
    Setup(stage=3, config=ABORT),  # all weights stay gathered
    Setup(stage=3, config=ABORT, zero={**GATHERED, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}),
    Setup(stage=3, config=ABORT, zero={"stage3_param_persistence_threshold": 16, "stage3_prefetch_bucket_size": 16}),
    Setup(stage=3, config=ABORT, checkpointing="non_reentrant", offload=True, zero={**GATHERED, **PARAMS}),
]


@pytest.mark.parametrize("setup", STAGE_3, ids=str)
@pytest.mark.parametrize(("place", "rank"), [("model 0", 1), ("model 1", 0), ("layer 1", 1), ("loss 0", 0)])
def test_a_failure_in_a_forward_that_gathers(two_ranks: RankGroup, setup: Setup, place: str, rank: int) -> None:
    """The other rank is in the next gather; the one that has failed gathers along, without computing."""
    assert_aborted(two_ranks.run(one_rank_fails, setup, place, rank), place, rank)


def test_a_failure_before_a_forward_that_nobody_has_announced(two_ranks: RankGroup) -> None:
    messages = two_ranks.run(one_rank_fails, SETUPS[-1], "data 1", 0, micro_batches=None)[0][0]
    assert messages == ["Aborted request 'r1': left out of update 1 (rank 0: KeyError: 'no data')."]


def without_a_block(setup: Setup) -> str:
    """A backward of the other rank raises, and the program has to call ``abort_request``."""
    import deepspeed.comm as dist

    from requestzero import AbortRequest

    engine = build(setup)
    engine.begin_request("r")
    if dist.get_rank() == 0:
        engine.abort_request("bad data")
        text = ""
    else:
        with pytest.raises(AbortRequest) as error:
            backward(engine, Micro(ALL, 1))
        text = str(error.value)
        with pytest.raises(RuntimeError, match=r"call engine\.abort_request"):
            engine.begin_request("next")
        engine.abort_request("as the other rank")
    backward(engine, Micro(ALL, 2))
    assert engine.update_window.micro_batches == 1
    engine.destroy()
    return text


def test_a_backward_raises_for_another_ranks_abort(two_ranks: RankGroup) -> None:
    assert two_ranks.run(without_a_block, Setup(config=ABORT)) == ["", "rank 0: bad data"]


def run_out_of_memory(_: torch.Tensor) -> None:
    raise MemoryError("in the backward")


def fails_inside_a_backward(engine: Any) -> None:
    """One rank raises as its last gradient comes, within the block of its request."""
    import deepspeed.comm as dist

    with engine.request("r"):
        if dist.get_rank() == 1:
            engine.module.layers[0].weight.register_hook(run_out_of_memory)
        backward(engine, Micro(ALL, 1))


def test_a_failure_inside_a_backward_on_one_rank_says_what_to_do(two_fresh_ranks: RankGroup) -> None:
    outcomes = two_fresh_ranks.run(outcome, fails_inside_a_backward, setup=Setup(config=ABORT))
    assert {each.error for each in outcomes} == {"RankDisagreementError"}, outcomes
    text = outcomes[0].text
    assert text == outcomes[1].text
    assert "rank 0: reduces the gradients of micro-batch 1 of request 'r'" in text
    assert "rank 1: aborts request 'r' after micro-batch 0: MemoryError: in the backward" in text
    assert text.endswith("restart from the last checkpoint.")


def sets_a_gradient_alone(engine: Any, other_aborts: bool) -> None:
    """One rank sets its part of a gradient in the second request, which it then cannot abort any more."""
    import deepspeed.comm as dist
    from deepspeed.utils import safe_get_local_grad, safe_set_full_grad, safe_set_local_grad

    engine.begin_request("before", micro_batches=1)
    backward(engine, Micro(ALL, 1))
    engine.begin_request("r", micro_batches=2)
    backward(engine, Micro(ALL, 2, request_end=False))
    param = next(engine.module.parameters())
    if dist.get_rank() == 1 and hasattr(param, "ds_id"):
        safe_set_local_grad(param, torch.ones_like(safe_get_local_grad(param)))
    elif dist.get_rank() == 1:
        safe_set_full_grad(param, torch.ones_like(param))
    if dist.get_rank() == 1 or other_aborts:
        engine.abort_request("bad data")
    backward(engine, Micro(ALL, 3))


@pytest.mark.parametrize(("stage", "other_aborts"), [(2, True), (3, True), (3, False)])
def test_a_rank_that_alone_cannot_abort_ends_all(two_fresh_ranks: RankGroup, stage: int, other_aborts: bool) -> None:
    zero = GATHERED if stage == 3 else {}
    outcomes = two_fresh_ranks.run(
        outcome, sets_a_gradient_alone, other_aborts, setup=Setup(stage=stage, zero=zero, config=ABORT)
    )
    assert {each.error for each in outcomes} == {"RankDisagreementError"}, outcomes
    assert outcomes[0].text == outcomes[1].text
    assert (
        "rank 1: failed after micro-batch 1 of request 'r': RuntimeError: abort_request('bad data')" in outcomes[0].text
    )
    assert "has set a gradient of the window since it began" in outcomes[0].text


def fails_as_the_other_aborts(engine: Any) -> None:
    """One rank raises in a backward, before it has looked how the others have voted on the request."""
    import deepspeed.comm as dist

    with engine.data_pass():
        engine.begin_request("r", micro_batches=1)
        loss = engine(*values(1, dist.get_rank(), dist.get_world_size()), ALL)
        if dist.get_rank() == 0:
            engine.abort_request("bad data")
            engine.begin_request("next", micro_batches=1)
        loss.register_hook(run_out_of_memory)
        engine.backward(loss)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_failure_as_another_rank_aborts_ends_all(two_fresh_ranks: RankGroup, stage: int) -> None:
    setup = Setup(stage=stage, config=ABORT)
    outcomes = two_fresh_ranks.run(outcome, fails_as_the_other_aborts, setup=setup, timeout=45.0)
    assert {each.error for each in outcomes} == {"RankDisagreementError"}, outcomes
    assert outcomes[0].text == outcomes[1].text
    assert "rank 0: begins request 'next' of 1 micro-batches" in outcomes[0].text
    assert "rank 1: failed after micro-batch 0 of request 'r': MemoryError: in the backward" in outcomes[0].text


def dies_as_the_other_aborts() -> None:
    """One rank dies once it knows of the abort."""
    import deepspeed.comm as dist

    engine = build(Setup(config=ABORT))
    engine.begin_request("r")
    if dist.get_rank() == 0:
        engine.abort_request("bad data")
    engine.agreement._channel.gather = lambda *_: os._exit(3)
    backward(engine, Micro(ALL, 1))


def test_a_rank_that_dies_as_another_aborts(two_fresh_ranks: RankGroup) -> None:
    with pytest.raises(RankError, match=r"RankDisagreementError: The connection to a data-parallel rank was lost \("):
        two_fresh_ranks.run(dies_as_the_other_aborts, timeout=30.0)


def aborts_at_length() -> list[str]:
    """Both ranks abort, with reasons of different lengths and letters."""
    import deepspeed.comm as dist

    engine = build(Setup(config=ABORT))
    engine.begin_request("r")
    with logged_by("requestzero") as messages:
        engine.abort_request("é" * 3000 if dist.get_rank() == 1 else "bad data")
    engine.destroy()
    return messages


def test_reasons_are_logged_in_full(two_ranks: RankGroup) -> None:
    messages = two_ranks.run(aborts_at_length)[0]
    assert messages == [f"Aborted request 'r': left out of update 1 (rank 0: bad data; rank 1: {'é' * 3000})."]


def begins_badly(engine: Any) -> None:
    """One rank cannot even begin."""
    import deepspeed.comm as dist

    with engine.request("r", micro_batches=0 if dist.get_rank() == 1 else 1):
        backward(engine, Micro(ALL, 1))


def test_a_block_that_one_rank_cannot_begin_ends_all(two_fresh_ranks: RankGroup) -> None:
    for each in two_fresh_ranks.run(outcome, begins_badly):
        assert each.error == "RankDisagreementError"
        assert "rank 1: failed after no request: ValueError: begin_request(micro_batches=0) is not allowed" in each.text


def aborts_in_a_forward(engine: Any, returns: bool, first: bool) -> None:
    """Raise or return ``AbortRequest`` on one rank, before a layer has gathered anything, in a first forward or not."""
    import deepspeed.comm as dist

    from requestzero import AbortRequest

    forward, aborts = engine.module.forward, dist.get_rank() == 1

    def call(*args: Any) -> Any:
        if aborts and not returns:
            raise AbortRequest("in the forward")
        return AbortRequest("in the forward") if aborts else forward(*args)

    start = masters(engine)
    if not first:
        with engine.request("before"):
            backward(engine, Micro(ALL, 2, request_end=False))
    engine.module.forward = call
    with engine.request("r"):
        loss = engine(*values(1, dist.get_rank(), dist.get_world_size()), ALL)
        if isinstance(loss, AbortRequest):
            raise loss
        engine.backward(loss)
    engine.module.forward = forward
    with engine.request("after"):
        backward(engine, Micro(ALL, 3, request_end=False))
    engine.step()
    assert_sums(difference(start, masters(engine)), [Micro(ALL, seed) for seed in ((3,) if first else (2, 3))])


IN_FORWARDS = Setup(stage=3, zero=GATHERED, config=ABORT)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("returns", [False, True])
def test_an_abort_inside_a_forward_on_one_rank(two_ranks: RankGroup, returns: bool, first: bool) -> None:
    outcomes = two_ranks.run(outcome, aborts_in_a_forward, returns, first, setup=IN_FORWARDS)
    assert [(each.error, each.text) for each in outcomes] == [("", "")] * 2


def comparisons(setup: Setup) -> list[int]:
    """Rounds of a window of two announced requests of two micro-batches, and its step, once the order is known."""
    engine = build(setup)
    for _ in range(2):
        before = engine.agreement._channel.rounds
        for number in range(2):
            engine.begin_request(number, micro_batches=2, window_end=number == 1)
            for part in range(2):
                backward(engine, Micro(ALL, number, request_end=part == 1))
        engine.step()
        rounds = engine.agreement._channel.rounds - before
    engine.destroy()
    return rounds


@pytest.mark.parametrize("stage", [1, 2])
def test_the_vote_costs_one_comparison_per_micro_batch_and_nothing_without_the_option(
    two_ranks: RankGroup, stage: int
) -> None:
    assert two_ranks.run(comparisons, Setup(stage=stage)) == [2, 2]
    assert two_ranks.run(comparisons, Setup(stage=stage, config=ABORT)) == [6, 6]
