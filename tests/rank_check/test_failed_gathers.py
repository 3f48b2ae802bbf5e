"""Stage 3: a gather of weights that fails on one rank in a request's forward, where the others wait in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any
from unittest.mock import patch

import pytest
import torch

from support.engines import build, masters
from support.logs import logged_by
from support.rank_scenarios import outcome, rank
from support.ranks import RankGroup
from support.setup import Setup
from support.stage_3 import GATHERED, PARAMS, Pairs, reference_of_pairs
from support.updates import assert_sums, difference
from support.windows import ALL, OUTS, Micro, inputs_of

ABORT = {"requestzero": {"abort": True}}
NO_PREFETCH = Setup(
    stage=3, config=ABORT, zero={**GATHERED, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
)
SETUPS = [
    NO_PREFETCH,
    Setup(stage=3, config=ABORT, zero=GATHERED),
    Setup(stage=3, config=ABORT, zero={**GATHERED, "stage3_allgather_sequential": True}),
    Setup(stage=3, config=ABORT, zero={"stage3_param_persistence_threshold": 16, "stage3_prefetch_bucket_size": 16}),
    Setup(stage=3, config=ABORT, zero={**GATHERED, "stage3_use_all_reduce_for_fetch_params": True}),
    Setup(
        stage=3, config=ABORT, checkpointing="non_reentrant", offload=True, model="bf16", zero={**GATHERED, **PARAMS}
    ),
]


@dataclass
class ScarceMemory:
    """``torch`` as DeepSpeed's gathers see it: an allocation fails for want of memory, or all while memory is short.

    The allocations are the buffer of a gather, and the weights that are cut out of it. Memory comes as others have left
    it.
    """

    fails_at: int = 0
    is_short: Callable[[], bool] = lambda: False
    allocations: int = 0
    failures: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int, **kwargs: Any) -> torch.Tensor:
        if size > 0:
            self._allocate("buffer")
        return torch.full((size,), 7, **kwargs)

    def zeros(self, size: int, **kwargs: Any) -> torch.Tensor:
        self._allocate("buffer")
        return torch.zeros(size, **kwargs)

    def cat(self, tensors: Any, **kwargs: Any) -> torch.Tensor:
        if "out" not in kwargs:
            self._allocate("weight")
        return torch.cat(tensors, **kwargs)

    def _allocate(self, name: str) -> None:
        self.allocations += 1
        if self.allocations == self.fails_at or self.is_short():
            self.failures.append(name)
            raise torch.OutOfMemoryError(f"at allocation {self.allocations}")


def in_place(memory: ScarceMemory) -> Any:
    from deepspeed.runtime.zero import partition_parameters

    return patch.object(partition_parameters, "torch", memory)


def run(engine: Any, number: int, memory: ScarceMemory, evaluates: bool = False) -> None:
    """Run a request of one micro-batch, in whose forward, or in an evaluation before it, memory is short."""
    with engine.request(number, micro_batches=1):
        with in_place(memory), torch.set_grad_enabled(not evaluates):
            loss = engine(*inputs_of(engine, number), ALL)
        if evaluates:
            loss = engine(*inputs_of(engine, number), ALL)
        engine.backward(loss)


def fail_everywhere(engine: Any, good: int, evaluates: bool, failing_ranks: tuple[int, ...]) -> list[str]:
    """Fail at every allocation of a forward in turn, each after some ``good`` requests; returns what has failed."""
    start, kept, numbers = masters(engine), [], count()
    failures: list[str] = []
    for fails_at in range(1, 20):
        for number in islice(numbers, good):
            run(engine, number, ScarceMemory(), evaluates)
            kept.append(Micro(ALL, number))
        memory, before = ScarceMemory(fails_at if rank() in failing_ranks else 0), engine.aborted_requests
        number = next(numbers)
        with suppress(torch.OutOfMemoryError):
            run(engine, number, memory, evaluates)
        failures += memory.failures
        if engine.aborted_requests == before:
            kept.append(Micro(ALL, number))
            break
    engine.step()
    assert_sums(difference(start, masters(engine)), kept)
    assert len(failures) in (0, engine.aborted_requests)
    return failures


def failures_of(setup: Setup, good: int, evaluates: bool, failing_ranks: tuple[int, ...] = (1,)) -> list[str]:
    engine = build(setup)
    with logged_by("requestzero") as messages:
        failures = fail_everywhere(engine, good, evaluates, failing_ranks)
    assert len(messages) == (engine.aborted_requests if rank() == 0 else 0)
    engine.destroy()
    return failures


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("good", [0, 1, 3])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_the_request_is_aborted(two_ranks: RankGroup, setup: Setup, good: int, evaluates: bool) -> None:
    """In a first forward, in one whose order is known, and after several, where DeepSpeed gathers ahead."""
    failures = two_ranks.run(failures_of, setup, good, evaluates)
    assert (failures[0], set(failures[1]) >= {"buffer"}) == ([], True)


def failures_with_streams(setup: Setup) -> list[str]:
    with patch("requestzero.zero.stage_3.gathers.has_streams", lambda: True):
        return failures_of(setup, 3, False)


@pytest.mark.parametrize("setup", SETUPS[1:3], ids=str)
def test_where_the_host_does_not_wait(two_ranks: RankGroup, setup: Setup) -> None:
    """On an accelerator only the gathers of forwards are repeatable; the others are as DeepSpeed makes them."""
    failures = two_ranks.run(failures_with_streams, setup)
    assert (failures[0], set(failures[1]) >= {"buffer"}) == ([], True)


@pytest.mark.parametrize("failing_ranks", [(0,), (0, 2), (0, 1, 2)], ids=str)
def test_of_three_ranks(three_ranks: RankGroup, failing_ranks: tuple[int, ...]) -> None:
    failures = three_ranks.run(failures_of, SETUPS[1], 3, False, failing_ranks)
    assert [bool(each) for each in failures] == [number in failing_ranks for number in range(3)]


def gathers_by_itself(setup: Setup, in_block: bool) -> list[str]:
    """The last layer needs the weight of the first, in a block that gathers it, or as an attribute."""
    import deepspeed

    engine = build(setup)
    first, layer = next(engine.module.parameters()), engine.module.layers[4]

    def call(x: torch.Tensor) -> torch.Tensor:
        with deepspeed.zero.GatheredParameters([first], enabled=in_block):
            assert first.numel() > 0 if in_block else engine.module.layers[0].weight.numel() > 0
        return torch.nn.functional.linear(x, layer.weight)

    with patch.object(layer, "forward", call):
        failures = fail_everywhere(engine, 0, False, (1,))
    engine.destroy()
    return failures


@pytest.mark.parametrize("in_block", [True, False])
def test_of_a_model_that_gathers_by_itself(two_ranks: RankGroup, in_block: bool) -> None:
    """From then on DeepSpeed gathers a weight that was used as an attribute with the layer's own, in one buffer."""
    failures = two_ranks.run(gathers_by_itself, NO_PREFETCH, in_block)
    assert failures == [[], ["buffer"] * 6 + ["weight"] * (not in_block)]


# --- modules of two weights -----------------------------------------------------------------------------------------


def failures_of_pairs(setup: Setup, uses: list[tuple[bool, ...]]) -> list[str]:
    """Fail at every allocation of a forward of the last modules in turn, each after forwards of the others."""
    engine = build(setup, model=Pairs("none", twice=False))
    start, kept, numbers = masters(engine), [], count()
    failures: list[str] = []
    for fails_at in range(1, 30):
        before = engine.aborted_requests
        for used in uses:
            memory = ScarceMemory(fails_at if rank() == 1 and used is uses[-1] else 0)
            micro = Micro(used, next(numbers))
            with suppress(torch.OutOfMemoryError), engine.request(micro.seed, micro_batches=1):
                with in_place(memory):
                    loss = engine(*inputs_of(engine, micro.seed), used)
                engine.backward(loss)
            kept.append(micro)
        failures += memory.failures
        if engine.aborted_requests == before:
            break
        kept.pop()
    engine.step()
    expected = reference_of_pairs([kept], world_size=2)[0]
    assert all(map(torch.equal, difference(start, masters(engine)), expected))
    engine.destroy()
    return failures


BOTH = (True,) * len(OUTS)
SOME = (True, False, True, False, True)


@pytest.mark.parametrize("uses", [[BOTH] * 4, [BOTH, BOTH, BOTH, SOME]], ids=["one order", "another order"])
@pytest.mark.parametrize("bucket", [9, 21, 30, 1000])
@pytest.mark.parametrize("sequential", [False, True])
def test_of_modules_with_two_weights(
    two_ranks: RankGroup, uses: list[tuple[bool, ...]], bucket: int, sequential: bool
) -> None:
    """DeepSpeed gathers ahead in the fetch that fails, and waits for more where a forward leaves the order."""
    zero = {"stage3_prefetch_bucket_size": bucket, "stage3_allgather_sequential": sequential}
    setup = replace(NO_PREFETCH, zero={**NO_PREFETCH.zero, **zero})
    nothing, failures = two_ranks.run(failures_of_pairs, setup, [(*used, *used) for used in uses])
    assert (nothing, len(failures) >= 6) == ([], True)


# --- memory that is short as long as the forward's frames live ------------------------------------------------------


class Activation:
    """Something large that a forward's frame holds."""


def holds_memory(engine: Any, error: str) -> list[str]:
    """On one rank all gathers fail from the third allocation on, or from an error of the model, while it is held."""
    memory, model, layer = ScarceMemory(), engine.module.forward, engine.module.layers[2].forward

    def run_model(*args: Any) -> Any:
        activation = Activation()
        held = weakref.ref(activation)
        is_short = lambda: held() is not None and memory.allocations >= 3  # noqa: E731
        memory.is_short = is_short if rank() == 1 and not error else memory.is_short
        return run_model_on(held, *args)

    def run_model_on(held: Any, *args: Any) -> Any:
        def fail(x: torch.Tensor) -> torch.Tensor:
            memory.is_short = lambda: held() is not None
            raise KeyError(error)

        with patch.object(engine.module.layers[2], "forward", fail if rank() == 1 and error else layer):
            return model(*args)

    for number in range(3):
        run(engine, number, ScarceMemory())
    with suppress(KeyError, torch.OutOfMemoryError), in_place(memory), engine.request("r"):
        with patch.object(engine.module, "forward", run_model):
            loss = engine(*inputs_of(engine, 3), ALL)
        engine.backward(loss)
    return memory.failures


def frees_memory(setup: Setup, error: str) -> list[str]:
    engine = build(setup)
    start = masters(engine)
    failures = holds_memory(engine, error)
    assert engine.aborted_requests == 1
    engine.step()
    assert_sums(difference(start, masters(engine)), [Micro(ALL, number) for number in range(3)])
    engine.destroy()
    return failures


@pytest.mark.parametrize(("error", "attempts"), [("", 2), ("no data", 1)])
@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[2]], ids=str)
def test_what_the_forward_holds_is_freed(two_ranks: RankGroup, setup: Setup, error: str, attempts: int) -> None:
    """A gather is repeated once more, without the locals of the frames that the exception has left."""
    failures = two_ranks.run(frees_memory, setup, error)
    assert failures[0] == []
    assert len(failures[1]) == attempts


# --- what ends all ranks --------------------------------------------------------------------------------------------


def stays_short(engine: Any) -> None:
    memory = ScarceMemory(is_short=lambda: rank() == 1)
    with in_place(memory), engine.request("r"):
        engine.backward(engine(*inputs_of(engine, 1), ALL))


def tries_again(engine: Any) -> None:
    """The program runs another forward in place of the one that has failed, without an abort."""
    engine.begin_request("r")
    with in_place(ScarceMemory(fails_at=2 if rank() == 1 else 0)), suppress(torch.OutOfMemoryError):
        engine.backward(engine(*inputs_of(engine, 1), ALL))
    engine.backward(engine(*inputs_of(engine, 2), ALL))


def goes_on(engine: Any) -> None:
    """The model takes the failed gather for one of its own errors, and runs another layer."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    layer, memory = engine.module.layers[0], ScarceMemory(fails_at=1 if rank() == 1 else 0)

    def run_model(x: torch.Tensor, w: torch.Tensor, uses: Any) -> torch.Tensor:
        with suppress(torch.OutOfMemoryError):
            layer(x)
        return engine.module.layers[1](x).sum()

    assert layer.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    with in_place(memory), engine.request("r"), patch.object(engine.module, "forward", run_model):
        engine.backward(engine(*inputs_of(engine, 1), ALL))


def returns(engine: Any) -> None:
    """As before, in the model's last layer, after which there is no gather."""
    run_first = engine.module.layers[0]
    memory = ScarceMemory(fails_at=1 if rank() == 1 else 0)

    def run_model(x: torch.Tensor, w: torch.Tensor, uses: Any) -> torch.Tensor:
        with suppress(torch.OutOfMemoryError):
            return run_first(x).sum()
        return x.sum().requires_grad_()

    with in_place(memory), engine.request("r"), patch.object(engine.module, "forward", run_model):
        engine.backward(engine(*inputs_of(engine, 1), ALL))


def evaluates_outside(engine: Any) -> None:
    """There is no request that could be aborted."""
    with in_place(ScarceMemory(fails_at=2 if rank() == 1 else 0)), torch.no_grad():
        engine(*inputs_of(engine, 1), ALL)


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        (stays_short, "OutOfMemoryError: at allocation"),
        (tries_again, "RuntimeError: A forward has gone on after a gather of weights has failed in it"),
        (goes_on, "RuntimeError: A forward has gone on after a gather of weights has failed in it"),
        (returns, "RuntimeError: A forward has gone on after a gather of weights has failed in it"),
        (evaluates_outside, "OutOfMemoryError: at allocation 2"),
    ],
)
def test_all_ranks_end(two_fresh_ranks: RankGroup, scenario: Any, text: str) -> None:
    outcomes = two_fresh_ranks.run(outcome, scenario, setup=NO_PREFETCH, timeout=45.0)
    assert {each.error for each in outcomes} == {"RankDisagreementError"}, outcomes
    for each in outcomes:
        assert "rank 1: failed after" in each.text
        assert text in each.text
