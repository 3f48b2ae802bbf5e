"""``on_overflow="drop_request"``: the window without the request that was not finite, exactly."""

from __future__ import annotations

import math
from itertools import cycle, product
from typing import Any

import pytest
import torch

from requestzero.probe.counters import Operators
from support.engines import build, masters, module_weights
from support.fp16 import fp16_on_cpu, fp16_where_needed
from support.grid import FP16_SUMS, PLACES, SUMS, every_place, every_sum
from support.logs import logged_by
from support.models import Few, OneWeight, feed, full_grad
from support.muon import batch, build_muon, momentum
from support.overflow_configs import fp16_masters, overflow_config
from support.poison import SPLIT, poisoned_backward
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import assert_sums, difference
from support.windows import ALL, LR, OUTS, Micro, backward, reference

DROP = {"on_overflow": "drop_request"}


def dropping(stage: int, offload: bool, model: str, accum: str, **fields: Any) -> Setup:
    return Setup(stage, offload, model, accum, config=overflow_config(model, **DROP), **fields)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"retain": True},
    {"groups": 3},
    {"checkpointing": "reentrant"},
    {"zero": {"overlap_comm": True}},
    {"zero": {"reduce_bucket_size": 8}},
    {"zero": {"contiguous_gradients": False}},
    {"zero": {"round_robin_gradients": True}, "groups": 3},
    {"zero": {"reduce_scatter": False}, "checkpointing": "nonreentrant"},
    {"zero": {"parameter_alignment": True}},
]
# position of the request, value, rank, layer and element; the layers are absent from later requests, or split.
POISONS = [
    (0, math.nan, 0, 4, -1),
    (1, math.inf, 1, SPLIT, 0),
    (2, -math.inf, 1, SPLIT, -1),
    (0, math.inf, 1, 0, 0),
    (1, math.nan, 0, SPLIT, -1),
    (2, math.nan, 1, 4, -1),
    (1, math.nan, 1, 4, 0),
]


def sampled() -> list[tuple[Setup, tuple[Any, ...], bool]]:
    """Every dtype in every place, with the options, poisons and ways to end a request taken in turn."""
    options, poisons, ends = cycle(OPTIONS), cycle(POISONS), cycle([True, False, True])
    return [
        (dropping(stage, offload, model, accum, **next(options)), next(poisons), next(ends))
        for (model, accum), (stage, offload) in product(SUMS + FP16_SUMS, PLACES)
    ] + [
        (dropping(stage, offload, "bf16", "fp32", **next(options)), next(poisons), next(ends))
        for (stage, offload), _ in product(PLACES, range(3))
    ]


def request_of(position: int, seed: int, bad: tuple[Any, ...] | None, marked: bool) -> list[Micro]:
    """Two micro-batches; the poisoned layer takes part up to the poisoned request only."""
    late = bad is not None and position > bad[0]
    uses = tuple(not (late and layer == bad[3]) for layer in range(len(OUTS))) if bad is not None else ALL
    return [Micro(uses, seed + 1, False), Micro((*uses[:1], False, *uses[2:]), seed + 2, marked)]


def run_request(engine: Any, micros: list[Micro], bad: tuple[Any, ...] | None) -> None:
    for i, micro in enumerate(micros):
        if bad is not None and i == 0:
            poisoned_backward(engine, micro, *bad[1:])
        else:
            backward(engine, micro)
    engine.end_request()  # changes nothing where its last backward was marked


def windows_with_a_bad_request(setup: Setup, bad: tuple[Any, ...], marked: bool) -> None:
    """One window with a bad request, one with nothing else, and a clean one; each against the reference."""
    with fp16_where_needed(setup.model):
        engine = build(setup)
        for number, (positions, poisoned) in enumerate([(3, {bad[0]}), (2, {0, 1}), (2, set())]):
            start, kept = masters(engine), []
            for position in range(positions):
                is_bad = position in poisoned
                micros = request_of(position, 100 * number + 10 * position, bad if len(poisoned) == 1 else None, marked)
                engine.begin_request(f"request {position}")
                run_request(engine, micros, bad if is_bad else None)
                kept += [] if is_bad else micros
            window = engine.update_window
            assert (window.micro_batches, window.requests) == (len(kept), len(kept) // 2)
            assert window.request_ids == [f"request {i}" for i in range(positions) if i not in poisoned]
            engine.set_gradient_accumulation_boundary(True)
            engine.step(divisor=window.micro_batches)
            assert engine.was_step_applied() == bool(kept)
            assert_sums(difference(start, masters(engine)), kept, divisor=max(1, len(kept)))
        counts = engine.attempted_updates, engine.applied_updates, engine.skipped_updates, engine.dropped_requests
        assert counts == (3, 2, 1, 3)
        assert engine.last_skip.request_ids == ("request 0", "request 1")
        assert engine.last_skip.cause == ("NaN" if math.isnan(bad[1]) else "inf")
        assert engine.consecutive_skips == 0
        engine.destroy()


@pytest.mark.parametrize(("setup", "bad", "marked"), sampled(), ids=str)
def test_the_other_requests_are_applied_exactly(
    two_ranks: RankGroup, setup: Setup, bad: tuple[Any, ...], marked: bool
) -> None:
    two_ranks.run(windows_with_a_bad_request, setup, bad, marked)


@every_place
def test_a_request_is_dropped_without_contiguous_gradients(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    """At stage 1 there are no gradient hooks then, in which a request would begin."""
    setup = dropping(stage, offload, "fp32", "fp32", zero={"contiguous_gradients": False})
    two_ranks.run(windows_with_a_bad_request, setup, POISONS[1], True)


def drops_are_told(setup: Setup) -> tuple[list[str], list[str]]:
    engine = build(setup)
    with logged_by("requestzero") as messages:
        for position in range(3):
            engine.begin_request(f"r{position}")
            run_request(engine, request_of(position, position, None, True), (0, math.nan, 1, 4, -1))
        engine.step()
    backward(engine, Micro(ALL, 1, False))
    engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(RuntimeError, match=r"step\(divisor=2\.0\) with an open request, which may yet") as error:
        engine.step(divisor=2.0)
    engine.destroy()
    return messages, [str(error.value)]


def test_drops_are_told_once_on_rank_0(two_ranks: RankGroup) -> None:
    (messages, error), (silent, same_error) = two_ranks.run(drops_are_told, dropping(2, True, "bf16", "fp32"))
    assert [line.split(":")[0] for line in messages] == [
        *(f"Left request 'r{i}' (2 micro-batches) out of update 1" for i in range(3)),
        "Skipped update 1 (NaN; requests 'r0', 'r1', 'r2'; loss scale 1)",
    ]
    assert messages[0].endswith("with it the gradient is not finite (NaN).")
    assert silent == []
    assert error == same_error


# --- other ways to drive a backward ---------------------------------------------------------------------------------


def coalesced_and_edited(setup: Setup) -> None:
    """A request that is a coalesced block; and gradients that the caller sets between requests, a dropped one too."""
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    engine = build(setup)
    start = masters(engine)
    backward(engine, Micro(ALL, 1))
    for bad in (True, False):
        with engine.coalesce_grad_reduction():
            backward(engine, Micro(ALL, 2), mark=False)
            if bad:
                poisoned_backward(engine, Micro(ALL, 3), math.nan, 1)
        assert engine.update_window.requests == (1 if bad else 2)
        begun = engine.agreement._progress.request.number
        assert begun == (2 if bad else 3)  # dropped or not, they are agreed on one by one
    layer = engine.module.layers[1].weight
    if setup.offload:
        safe_set_full_grad(layer, torch.full_like(layer, 8.0))
    poisoned_backward(engine, Micro(ALL, 4), math.inf, 0, SPLIT)
    wanted = reference([[Micro(ALL, 1), Micro(ALL, 2)]], 2)[0]
    if setup.offload:
        wanted[1] = torch.full_like(wanted[1], 8.0)
        assert torch.equal(safe_get_full_grad(layer).double().cpu(), wanted[1])
        safe_set_full_grad(layer, torch.full_like(layer, 4.0))
        wanted[1] = torch.full_like(wanted[1], 4.0)
    poisoned_backward(engine, Micro(ALL, 5), math.nan, 1, SPLIT)
    engine.step()
    assert engine.dropped_requests == 3
    norm = math.sqrt(sum(float(total.square().sum()) for total in wanted))
    assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-6)
    for applied, total in zip(difference(start, masters(engine)), wanted, strict=True):
        assert torch.equal(applied, total)
    engine.destroy()


@every_place
@pytest.mark.parametrize(("model", "accum"), [("bf16", "bf16"), ("bf16", "fp32")])
def test_coalesced_requests_and_set_gradients(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str
) -> None:
    two_ranks.run(coalesced_and_edited, dropping(stage, offload, model, accum, retain=accum == "fp32" and offload))


def beyond_fp16(stage: int) -> tuple[list[float], int]:
    """fp16 masters and fp32 accumulation: the second request takes the sum out of the host gradient's range."""
    config = fp16_masters(**DROP)
    setup = Setup(stage=stage, offload=True, model="fp16", accum="fp32", optimizer="cpu_adam", config=config)
    with fp16_on_cpu():
        engine = build(setup, model=OneWeight())
        for value in (16384.0, 57344.0, 32768.0):
            feed(engine, value)
        total = full_grad(engine).tolist()
        engine.step()
        assert engine.was_step_applied()
        engine.destroy()
    return total, engine.dropped_requests


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_checked_is_the_value_on_the_host(two_ranks: RankGroup, stage: int) -> None:
    assert two_ranks.run(beyond_fp16, stage) == [([49152.0] * 8, 1)] * 2


def muon_with_a_bad_request(stage: int, offload: bool, model: str, accum: str, bad: bool) -> list[torch.Tensor]:
    """Weights and momentum after two updates, with a request that is dropped from each or without it."""
    engine = build_muon(stage, offload, model, accum, **overflow_config(model, **DROP))
    for step in range(2):
        for request in range(3 if bad else 2):
            engine.set_gradient_accumulation_boundary(True)
            x = batch(engine, step, request % 2)
            engine.backward(engine(x * math.nan if request == 2 else x))
        engine.step(divisor=engine.update_window.micro_batches)
    assert engine.dropped_requests == (2 if bad else 0)
    result = [*module_weights(engine), *momentum(engine)]
    engine.destroy()
    return result


@pytest.mark.parametrize(("stage", "offload", "accum"), [(1, False, "fp32"), (2, False, "bf16"), (2, True, "fp32")])
def test_muon(two_ranks: RankGroup, stage: int, offload: bool, accum: str) -> None:
    with_bad, without = (
        two_ranks.run(muon_with_a_bad_request, stage, offload, "bf16", accum, b) for b in (True, False)
    )
    for a, b in zip(with_bad, without, strict=True):
        assert all(map(torch.equal, a, b))


def few_elements(setup: Setup) -> None:
    """Two groups of two and three elements on four ranks: some own nothing but padding."""
    engine = build(setup, model=Few([2, 3]))
    start = masters(engine)
    for value in (1.0, math.nan, 2.0, math.inf):
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(value))
    assert (engine.update_window.micro_batches, engine.dropped_requests) == (2, 2)
    engine.step(divisor=2.0)
    for before, after in zip(start, masters(engine), strict=True):
        assert torch.equal((before - after) / LR, torch.full_like(after, 1.5))
    engine.destroy()


@every_place
@pytest.mark.parametrize("accum", ["bf16", "fp32"])
def test_ranks_that_own_nothing(four_ranks: RankGroup, stage: int, offload: bool, accum: str) -> None:
    four_ranks.run(few_elements, dropping(stage, offload, "bf16", accum, groups=2), timeout=60)


# --- costs ----------------------------------------------------------------------------------------------------------


def costs(setup: Setup) -> tuple[list[int], int, list[int]]:
    """Host reads of four backwards, of the step, and bytes of the backup after each request."""
    engine = build(setup)
    reads, held = [], []
    for seed, end in enumerate((True, False, True, True)):
        engine.set_gradient_accumulation_boundary(end)
        with Operators() as operators:
            backward(engine, Micro(ALL, seed, end))
        reads.append(operators.host_reads)
        held.append(engine.request_backup_bytes)
    with Operators() as operators:
        engine.step()
    engine.destroy()
    return reads, operators.host_reads, held


@every_place
@every_sum
def test_one_host_read_per_request_and_one_copy_of_the_sums(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str
) -> None:
    elements = 38  # a partition
    for reads, step, held in two_ranks.run(costs, dropping(stage, offload, model, accum)):
        assert (reads, step) == ([1, 0, 1, 1], 1)
        copied = elements * (4 if offload or accum == "fp32" else 2)  # fp32 on the host, or the sum's dtype
        if offload and (model, accum) == ("bf16", "fp32"):
            copied = 0  # the host gradient keeps the sum until a request has been checked
        # A window of one request copies nothing, and one whose gradients wait on their rank nothing before its end.
        assert held == [0, copied if stage == 2 else 0, copied, copied]


class BackwardInForward(torch.nn.Module):
    """Runs a backward of ``head`` within its forward, as DeepSpeed's ``TiledFusedLogitsLoss`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Parameter(torch.ones(8))
        self.head = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body * 1.0
        leaf = hidden.detach().requires_grad_()
        with torch.enable_grad():
            (self.head * leaf * x).sum().backward()
        assert leaf.grad is not None
        return (hidden * leaf.grad).sum()


class Interruptible(torch.nn.Module):
    """Its backward runs out of memory, before any gradient, for an input of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.weight * x
        if not x.any():
            product.register_hook(run_out_of_memory)
        return product.sum()


def run_out_of_memory(_: torch.Tensor) -> None:
    raise MemoryError


def sums_after_a_drop(setup: Setup, model: torch.nn.Module, interrupted: bool) -> tuple[int, list[list[float]]]:
    """Requests that were dropped of 1, 2 and inf, and the gradients that are left."""
    from deepspeed.utils import safe_get_full_grad

    engine: Any = build(setup, model=model)
    for value in ([0.0] if interrupted else []) + [1.0, 2.0, math.inf]:
        engine.set_gradient_accumulation_boundary(True)
        loss = engine(torch.full((8,), value, device=engine.device))
        try:
            engine.backward(loss)
        except MemoryError:
            assert value == 0.0
    found = engine.dropped_requests, [safe_get_full_grad(each).tolist() for each in engine.module.parameters()]
    engine.destroy()
    return found


@every_place
@pytest.mark.parametrize("bucket", [4, 1_000], ids=["own reductions", "one bucket"])
def test_a_request_with_a_backward_within_its_forward_is_undone(
    two_ranks: RankGroup, stage: int, offload: bool, bucket: int
) -> None:
    setup = dropping(stage, offload, "fp32", "fp32", zero={"reduce_bucket_size": bucket})
    found = two_ranks.run(sums_after_a_drop, setup, BackwardInForward(), False)
    assert found == [(1, [[3.0] * 8, [3.0] * 8])] * 2


@every_place
def test_a_request_is_undone_after_an_interrupted_backward(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    setup = dropping(stage, offload, "fp32", "fp32")
    assert two_ranks.run(sums_after_a_drop, setup, Interruptible(), True) == [(1, [[3.0] * 8])] * 2
