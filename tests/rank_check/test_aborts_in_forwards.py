"""Stage 3: a request that one rank aborts in a forward whose order of gathers is not known, or is another one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch

from support.engines import build, masters
from support.logs import logged_by
from support.rank_scenarios import outcome, rank
from support.ranks import RankGroup
from support.setup import Setup
from support.stage_3 import GATHERED, PARAMS
from support.updates import assert_sums, difference
from support.windows import ALL, Micro, backward, inputs_of

ABORT = {"requestzero": {"abort": True}}
IN_FORWARDS = Setup(stage=3, zero=GATHERED, config=ABORT)
SETUPS = [
    IN_FORWARDS,
    Setup(stage=3, config=ABORT, zero={**GATHERED, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}),
    Setup(stage=3, config=ABORT, zero={"stage3_param_persistence_threshold": 16, "stage3_prefetch_bucket_size": 16}),
    Setup(stage=3, config=ABORT, zero={**GATHERED, "stage3_max_live_parameters": 0}),
    Setup(stage=3, config=ABORT, checkpointing="non_reentrant", offload=True, zero={**GATHERED, **PARAMS}),
    Setup(stage=3, config=ABORT, checkpointing="reentrant", model="bf16", zero=GATHERED),
]


@dataclass(frozen=True)
class Request:
    """One micro-batch; ``place`` is where it fails on one rank, empty where it does not."""

    uses: tuple[bool, ...] = ALL
    place: str = ""


def failing_in(engine: Any, place: str) -> AbstractContextManager[Any]:
    """In the model's forward before its first layer, in a layer's, or between the forward and the backward."""
    name, _, number = place.partition(" ")
    if not place:
        return nullcontext()
    owner = {"model": engine.module, "layer": engine.module.layers[int(number or 0)], "loss": engine}[name]
    return patch.object(owner, "backward" if name == "loss" else "forward", side_effect=KeyError(place))


def run(engine: Any, requests: list[Request], failing_rank: int) -> list[int]:
    """Run requests in blocks, and return how often the ranks have compared in each."""
    rounds = []
    for number, request in enumerate(requests):
        before, fails = engine.agreement._channel.rounds, request.place if rank() == failing_rank else ""
        try:
            with engine.request(number, micro_batches=1), failing_in(engine, fails):
                backward(engine, Micro(request.uses, number, request_end=False))
        except KeyError as error:
            assert error.args == (fails,)  # noqa: PT017
        else:
            assert not fails
        rounds.append(engine.agreement._channel.rounds - before)
    return rounds


def aborted(setup: Setup, requests: list[Request], failing_rank: int) -> list[str]:
    """Apply the requests of which no rank fails; returns the log."""
    engine = build(setup)
    start = masters(engine)
    with logged_by("requestzero") as messages:
        run(engine, requests, failing_rank)
    engine.step()
    kept = [Micro(request.uses, number) for number, request in enumerate(requests) if not request.place]
    assert_sums(difference(start, masters(engine)), kept)
    engine.destroy()
    return messages


def assert_logged(messages: list[str], requests: list[Request], failing_rank: int) -> None:
    assert messages == [
        f"Aborted request {number}: left out of update 1 (rank {failing_rank}: KeyError: {request.place!r})."
        for number, request in enumerate(requests)
        if request.place
    ]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_in_first_forwards(two_ranks: RankGroup, setup: Setup) -> None:
    """Until one has ended no order is known, and the aborted ones are forgotten."""
    requests = [Request(place=place) for place in ("model", "layer 0", "layer 3", "layer 4", "loss", "")] * 2
    assert_logged(two_ranks.run(aborted, setup, requests, 1)[0], requests, 1)


def test_between_three_ranks(three_ranks: RankGroup) -> None:
    requests = [Request(place=place) for place in ("layer 2", "")] * 2
    assert_logged(three_ranks.run(aborted, IN_FORWARDS, requests, 2)[0], requests, 2)


EVERY_SECOND, BEGIN = (True, False, True, False, True), (True, True, False, False, False)


@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[2], SETUPS[4]], ids=str)
@pytest.mark.parametrize(
    ("known", "other"), [(ALL, EVERY_SECOND), (EVERY_SECOND, ALL), (ALL, BEGIN), (BEGIN, ALL)], ids=str
)
def test_in_another_order(two_ranks: RankGroup, setup: Setup, known: tuple[bool, ...], other: tuple[bool, ...]) -> None:
    """The rank that has failed is in a gather that the others never come to, before they know of it; or it fails later.

    After two forwards in one order DeepSpeed prefetches. The other order becomes known with the last request but two.
    """
    places = ["model", "layer 0", *(f"layer {n}" for n in range(1, 5) if other[n]), "loss", "", "model", "loss"]
    requests = [each for place in places for each in (*[Request(known)] * 3, Request(other, place))]
    assert_logged(two_ranks.run(aborted, setup, requests, 0)[0], requests, 0)


def comparisons(setup: Setup, requests: list[Request]) -> list[int]:
    engine = build(setup)
    rounds = run(engine, requests, failing_rank=-1)
    engine.destroy()
    return rounds


def test_what_it_costs(two_ranks: RankGroup) -> None:
    """Without a known order one vote at the start of the forward, and one for each of its gathers; else nothing.

    A forward votes once where it leaves one order for another that is known. The rest is what every request has: its
    announcement, two votes, the end of the block, and the order of reductions where that is new.
    """
    orders = [ALL, ALL, ALL, EVERY_SECOND, ALL, EVERY_SECOND, EVERY_SECOND, EVERY_SECOND]
    requests = [Request(uses) for uses in orders]
    with_abort, without = (
        two_ranks.run(comparisons, setup, requests)[0] for setup in (IN_FORWARDS, Setup(stage=3, zero=GATHERED))
    )
    votes = [a - b for a, b in zip(with_abort, without, strict=True)]
    assert votes == [3 + 1 + 5, 3, 3, 3 + 1 + 2, 3 + 1, 3 + 1, 3, 3]


def test_what_stays_gathered_costs_nothing(two_ranks: RankGroup) -> None:
    """It is gathered once, in the first forward, and not in the second, whose order is another one."""
    setups, requests = (Setup(stage=3, config=ABORT), Setup(stage=3)), [Request(), Request(EVERY_SECOND)]
    with_abort, without = (two_ranks.run(comparisons, setup, requests)[0] for setup in setups)
    assert [a - b for a, b in zip(with_abort, without, strict=True)] == [3 + 1 + 5, 3 + 1]


def gathers_by_itself(setup: Setup, requests: list[Request], in_block: bool) -> list[str]:
    """A layer whose forward needs the weight of another, in a block that gathers it, or as an attribute."""
    import deepspeed

    engine = build(setup)
    start, first, layer = masters(engine), next(engine.module.parameters()), engine.module.layers[4]

    def call(x: torch.Tensor) -> torch.Tensor:
        if not in_block:
            assert engine.module.layers[0].weight.numel() > 0
        with deepspeed.zero.GatheredParameters([first], enabled=in_block):
            assert first.numel() > 0 or not in_block
        return torch.nn.functional.linear(x, layer.weight)

    with patch.object(layer, "forward", call), logged_by("requestzero") as messages:
        run(engine, requests, failing_rank=1)
    engine.step()
    kept = [Micro(request.uses, number) for number, request in enumerate(requests) if not request.place]
    assert_sums(difference(start, masters(engine)), kept)
    engine.destroy()
    return messages


@pytest.mark.parametrize("in_block", [True, False])
def test_a_model_that_gathers_by_itself(two_ranks: RankGroup, in_block: bool) -> None:
    """The rank that goes along would not gather there, so that the ranks vote before it though the order is known."""
    places = ("layer 4", "", "layer 1", "", "", "layer 4", "layer 1", "")
    requests = [Request(place=place) for place in places]
    assert_logged(two_ranks.run(gathers_by_itself, SETUPS[1], requests, in_block)[0], requests, 1)


# --- a call of abort_request inside a forward -----------------------------------------------------------------------


def calls_inside(engine: Any, calling_rank: int | None, block: bool) -> None:
    """Call ``abort_request`` in the model's forward, between two layers, on one rank or on all."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    from requestzero import AbortRequest

    run(engine, [Request()] * 2, failing_rank=-1)
    running = len(FWD_MODULE_STACK)
    engine.step()
    start = masters(engine)
    forward = engine.module.layers[2].forward

    def call(x: torch.Tensor) -> torch.Tensor:
        if calling_rank in (None, rank()):
            engine.abort_request("late")
        return forward(x)

    with patch.object(engine.module.layers[2], "forward", call):
        if block:
            with engine.request("r"):
                backward(engine, Micro(ALL, 2, request_end=False))
        else:
            engine.begin_request("r")
            with pytest.raises(AbortRequest, match="late"):
                backward(engine, Micro(ALL, 2))
            assert engine.aborted_requests == 0
            engine.abort_request("late")
    assert (engine.aborted_requests, len(FWD_MODULE_STACK)) == (1, running)
    assert tuple(engine.module.layers[2].weight.shape) == (0,)  # as between forwards, and a look gathers nothing
    backward(engine, Micro(ALL, 3))
    engine.step()
    assert_sums(difference(start, masters(engine)), [Micro(ALL, 3)])


@pytest.mark.parametrize(("calling_rank", "block"), [(None, True), (None, False), (1, True), (0, False)])
def test_a_call_inside_a_forward_leaves_it(two_ranks: RankGroup, calling_rank: int | None, block: bool) -> None:
    """Its weights are in use: they are released once the forward is left."""
    outcomes = two_ranks.run(outcome, calls_inside, calling_rank, block, setup=IN_FORWARDS)
    assert [(each.error, each.text) for each in outcomes] == [("", "")] * 2


# --- evaluations in a request ---------------------------------------------------------------------------------------


def evaluates_and_fails(setup: Setup, places: list[str], uses: tuple[bool, ...], failing_rank: int) -> list[str]:
    """Requests with an evaluation of some layers before their micro-batch; one rank fails in it, before or after it."""
    engine = build(setup)
    start, kept = masters(engine), []
    with logged_by("requestzero") as messages:
        for number, place in enumerate(places):
            fails = place if rank() == failing_rank else ""
            with suppress(KeyError), engine.request(number):
                if fails == "data":
                    raise KeyError(fails)
                with failing_in(engine, fails), torch.no_grad():
                    engine(*inputs_of(engine, 100 + number), uses)
                with failing_in(engine, "model" if fails == "loss" else ""):
                    backward(engine, Micro(ALL, number, request_end=False))
            if not place:
                kept.append(Micro(ALL, number))
            assert engine.update_window.micro_batches == len(kept)
    engine.step()
    assert_sums(difference(start, masters(engine)), kept)
    engine.destroy()
    return messages


@pytest.mark.parametrize("uses", [ALL, EVERY_SECOND], ids=str)
@pytest.mark.parametrize("good", [0, 1, 3])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_in_evaluations(two_ranks: RankGroup, setup: Setup, good: int, uses: tuple[bool, ...]) -> None:
    """A forward without gradients in a request, as for the log-probabilities of a rollout, is followed likewise."""
    fails = ("data", "model", "layer 0", "layer 2", "layer 4", "loss")
    places = [place for each in fails for place in (*[""] * good, each)] + [""]
    messages = two_ranks.run(evaluates_and_fails, setup, places, uses, 1)[0]
    assert len(messages) == len(fails)


# --- what stays impossible ------------------------------------------------------------------------------------------


def gathers_once_more(engine: Any) -> None:
    """One rank has begun a gather that the other has not, as on GPUs, where nobody waits for it yet."""
    with engine.request("r"):
        if rank() == 0:
            engine.agreement.note_gather()
        if rank() == 1:
            raise KeyError("no data")
        backward(engine, Micro(ALL, 1))


def fails_in_a_backward(engine: Any) -> None:
    """One rank fails while it recomputes a layer, in the engine's first backward."""
    layer = engine.module.layers[1]
    forward, calls = layer.forward, []

    def call(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if rank() == 1 and len(calls) == 2:
            raise MemoryError("no memory")
        return forward(x)

    layer.forward = call
    with engine.request("r"):
        backward(engine, Micro(ALL, 1))


def fails_in_a_second_engine(engine: Any) -> None:
    """One rank fails in a forward of another engine within the block, where the other gathers that one's weights."""
    second = build(SETUPS[1])
    try:
        for number in range(3):
            with engine.request(number), failing_in(second, "layer 1" if number == 2 and rank() == 1 else ""):
                with torch.no_grad():
                    second(*inputs_of(second, number), ALL)
                backward(engine, Micro(ALL, number, request_end=False))
    finally:
        second.destroy()


def fails_in_two_blocks(engine: Any) -> None:
    """The blocks of two engines, one in the other: the rank that fails votes in the inner one, the other elsewhere."""
    second = build(Setup(stage=engine.zero_optimization_stage(), config=ABORT))
    try:
        with engine.request("outer"), second.request("inner"):
            if rank() == 1:
                raise KeyError("no data")
            backward(engine, Micro(ALL, 1, request_end=False))
            backward(second, Micro(ALL, 1, request_end=False))
    finally:
        second.destroy()


@pytest.mark.parametrize("scenario", [fails_in_a_second_engine, fails_in_two_blocks])
@pytest.mark.parametrize("setup", [SETUPS[1], Setup(stage=1, config=ABORT)], ids=str)
def test_all_ranks_end_with_two_engines(two_fresh_ranks: RankGroup, setup: Setup, scenario: Any) -> None:
    outcomes = two_fresh_ranks.run(outcome, scenario, setup=setup, timeout=45.0)
    assert {each.error for each in outcomes} == {"RankDisagreementError"}, outcomes
    assert "rank 1: aborts request" in outcomes[0].text


@pytest.mark.parametrize(
    ("scenario", "checkpointing", "text"),
    [
        (gathers_once_more, "none", "aborts request 'r': KeyError: 'no data', after 0 gathers of weights"),
        (fails_in_a_backward, "non_reentrant", "aborts request 'r' after micro-batch 0: MemoryError: no memory"),
    ],
)
def test_all_ranks_end_together(two_fresh_ranks: RankGroup, scenario: Any, checkpointing: str, text: str) -> None:
    setup = Setup(stage=3, zero=GATHERED, config=ABORT, checkpointing=checkpointing)
    outcomes = two_fresh_ranks.run(outcome, scenario, setup=setup, timeout=45.0)
    assert {each.error for each in outcomes} == {"RankDisagreementError"}, outcomes
    assert f"rank 1: {text}" in outcomes[0].text
    assert outcomes[0].text.endswith("restart from the last checkpoint.")
