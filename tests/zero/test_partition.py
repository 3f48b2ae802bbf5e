"""fp32 accumulation on a 16-bit model: precision, where the partition lives, copies, and what users read and write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from requestzero.probe.counters import Allocations, Operators
from support.engines import build, masters
from support.fp16 import fp16_on_cpu
from support.models import Numbered, OneWeight, feed, full_grad
from support.ranks import RankGroup
from support.releases import needs_deepspeed
from support.setup import AT_REQUEST_ENDS, Setup
from support.windows import ALL, Micro, backward

FP32_SUM = {"model": "bf16", "accum": "fp32"}


# --- precision ------------------------------------------------------------------------------------------------------


def mean_of_two_ranks(setup: Setup, move_states: bool) -> tuple[torch.Tensor, list[torch.dtype]]:
    import deepspeed.comm as dist

    engine = build(setup, model=OneWeight())
    feed(engine, 1.0 if dist.get_rank() == 0 else 1.0078125)
    optimizer = engine.optimizer
    if move_states:
        engine.offload_states(pin_memory=False)
        engine.reload_states()
    (accumulator,) = optimizer.sums.accumulators
    stored = accumulator.tensors() if accumulator.device_bytes else []
    stored += [t for t in (getattr(optimizer, "grads_in_partition", None),) if t is not None]
    dtypes = [t.dtype for t in stored]
    assert optimizer.all_grad_tensors.get(0) is None, "a second copy of the partition, in the model's dtype"
    result = full_grad(engine)
    engine.destroy()
    return result, dtypes


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("move_states", [False, True])
def test_fp32_reduction_keeps_what_bf16_would_round(
    two_ranks: RankGroup, stage: int, offload: bool, contiguous: bool, move_states: bool
) -> None:
    setup = Setup(
        stage=stage,
        offload=offload,
        **FP32_SUM,
        zero={"contiguous_gradients": contiguous},
        retain=True,
        at=AT_REQUEST_ENDS[stage],
        config={"communication_data_type": "fp32"},
    )
    for grad, dtypes in two_ranks.run(mean_of_two_ranks, setup, move_states):
        assert torch.equal(grad, torch.full((8,), 1.00390625))
        assert dtypes == [torch.float32], "the partition is stored once, in fp32"


def window_error(setup: Setup, requestzero: bool = True) -> float:
    """Largest relative error of a window of 16 micro-batches of one request, read before the step."""
    engine = build(setup, requestzero, model=OneWeight(64))
    dtype = engine.module.weight.dtype
    generator = torch.Generator().manual_seed(3)
    exact = torch.zeros(64, dtype=torch.float64)
    for i in range(16):
        x = (1 + torch.rand(64, generator=generator)).to(dtype)
        exact += x.double()
        engine.set_gradient_accumulation_boundary(i == 15)
        engine.backward(engine(x.to(engine.device)))
    error = ((full_grad(engine).double() - exact) / exact).abs().max().item()
    engine.destroy()
    return error


@pytest.mark.parametrize("stage", [1, 2])
def test_precision_of_a_long_window(two_ranks: RankGroup, stage: int) -> None:
    error = two_ranks.run(window_error, Setup(stage=stage, offload=True, **FP32_SUM))[0]
    # fp32 sums of 16 bf16 values between 1 and 2: at most a few units in the last place of fp32.
    assert error < 1e-6
    assert two_ranks.run(window_error, Setup(stage=stage, offload=True, model="bf16", accum="bf16"))[0] > 1e-3


@needs_deepspeed("an older one rounds nothing here")
def test_stock_stage_1_rounds_the_window_to_bf16(two_ranks: RankGroup) -> None:
    """The default reduction dtype matters: DeepSpeed's own stage 1 loses what fp32 accumulation has kept."""
    assert two_ranks.run(window_error, Setup(stage=1, offload=True, **FP32_SUM), requestzero=False)[0] > 1e-3


def test_the_users_communication_dtype_wins(two_ranks: RankGroup) -> None:
    setup = Setup(stage=1, offload=True, **FP32_SUM, config={"communication_data_type": "bf16"})
    assert two_ranks.run(window_error, setup)[0] > 1e-3


def has_this_optimizer(setup: Setup) -> bool:
    from requestzero.zero.stage_1_and_2.optimizer import RequestZeROOptimizer

    engine = build(setup)
    found = isinstance(engine.optimizer, RequestZeROOptimizer)
    engine.destroy()
    return found


def test_stage_1_bf16_with_fp32_accumulation_uses_this_optimizer(one_rank: RankGroup) -> None:
    assert one_rank.run(has_this_optimizer, Setup(stage=1, **FP32_SUM)) == [True]


# --- release and restore --------------------------------------------------------------------------------------------


def bytes_over_a_window(setup: Setup) -> tuple[list[int], int, list[torch.Tensor]]:
    engine = build(setup)
    held = []
    for i, end in enumerate((False, True, False, True)):
        backward(engine, Micro(ALL, i, end))
        held.append(engine.grad_partition_bytes)
    engine.step()
    held.append(engine.grad_partition_bytes)
    for seed in range(3):
        backward(engine, Micro(ALL, seed))
    engine.step()
    result = (held, engine.peak_grad_partition_bytes, masters(engine))
    engine.destroy()
    return result


@pytest.mark.parametrize("stage", [1, 2])
def test_partition_is_released_between_requests_or_retained(two_ranks: RankGroup, stage: int) -> None:
    partition = 4 * 38  # bytes in fp32: 76 elements over two ranks
    setup = Setup(stage=stage, offload=True, **FP32_SUM, at=AT_REQUEST_ENDS[stage])
    released = two_ranks.run(bytes_over_a_window, setup)[0]
    retained = two_ranks.run(bytes_over_a_window, replace(setup, retain=True))[0]
    inside = partition if stage == 2 else 0  # stage 1 reduces at the request's end only
    assert released[0] == [inside, 0, inside, 0, 0]
    assert retained[0] == [inside, partition, partition, partition, 0]
    assert released[1] == retained[1] == partition
    assert all(torch.equal(a, b) for a, b in zip(released[2], retained[2], strict=True)), "the weights must not differ"


SIZE = 2**20


def copies_and_memory(setup: Setup, requestzero: bool, ends: list[bool]) -> list[tuple[int, int]]:
    """After every backward of a window: its copies into the host gradient, and the bytes kept since the window began.

    Measured on what operators allocate, whoever holds it: on the CPU, buffers on the device and on the host alike.
    """
    with fp16_on_cpu():
        engine = build(setup, requestzero, model=OneWeight(SIZE))
        host = engine.optimizer.single_partition_of_fp32_groups[0].grad
        seen, allocations = [], Allocations()
        for end in ends:
            engine.set_gradient_accumulation_boundary(end)
            x = torch.ones_like(engine.module.weight)
            with Operators([host]) as operators, allocations:
                engine.backward(engine(x))
            seen.append((operators.copies_into_destinations, allocations.bytes_in_use))
        engine.step()
        assert allocations.bytes_in_use == 0 or not requestzero
        engine.destroy()
    return seen


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_default_accumulation_keeps_no_buffer_and_copies_once(one_rank: RankGroup, stage: int, dtype: str) -> None:
    setup = Setup(stage=stage, offload=True, model=dtype, accum=dtype, at=AT_REQUEST_ENDS[stage])
    # One backward of 1,048,576 values: no partition-sized buffer on the device, none on the host.
    assert one_rank.run(copies_and_memory, setup, True, [True]) == [[(1, 0)]]
    assert one_rank.run(copies_and_memory, setup, True, [True, True, True]) == [[(1, 0)] * 3]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_stock_keeps_an_auxiliary_buffer_after_two_backwards(one_rank: RankGroup, dtype: str) -> None:
    setup = Setup(stage=2, offload=True, model=dtype, accum=dtype)
    assert one_rank.run(copies_and_memory, setup, True, [False, True]) == [[(1, 0), (1, 0)]]
    stock = one_rank.run(copies_and_memory, setup, False, [False, True])[0]
    assert stock == [(0, 2 * SIZE), (1, 2 * SIZE)], "this can fail: DeepSpeed's own optimizer keeps a buffer"


@pytest.mark.parametrize("stage", [1, 2])
def test_fp32_accumulation_releases_its_partition_at_request_ends(one_rank: RankGroup, stage: int) -> None:
    setup = Setup(stage=stage, offload=True, **FP32_SUM, at=AT_REQUEST_ENDS[stage])
    seen = one_rank.run(copies_and_memory, setup, True, [False, True, False, True])[0]
    assert [copies for copies, _ in seen] == [0, 1, 0, 1]
    assert [kept for _, kept in seen[1::2]] == [0, 0]
    if stage == 2:  # stage 1 keeps the open request's own gradients and its reduction bucket
        assert [kept for _, kept in seen[0::2]] == [4 * SIZE, 4 * SIZE]


ENDS = [False, True, False, True]


def test_a_retained_partition_stays_until_the_step(one_rank: RankGroup) -> None:
    retained = one_rank.run(copies_and_memory, Setup(offload=True, **FP32_SUM, retain=True), True, ENDS)[0]
    assert [kept for _, kept in retained] == [4 * SIZE] * 4


@needs_deepspeed("0.19.6 keeps sums in the model's dtype")
def test_stock_releases_no_partition_before_the_step(one_rank: RankGroup) -> None:
    stock = one_rank.run(copies_and_memory, Setup(offload=True, **FP32_SUM), False, ENDS)[0]
    assert [kept for _, kept in stock] == [4 * SIZE] * 4


# --- gradients set by the user --------------------------------------------------------------------------------------


def set_between_requests(setup: Setup, last: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Sum 1, set to 5, then (unless ``last``) another request of 2."""
    from deepspeed.utils import safe_set_full_grad

    engine = build(setup, model=OneWeight())
    feed(engine, 1.0)
    safe_set_full_grad(engine.module.weight, torch.full((8,), 5.0, device=engine.device))
    if not last:
        feed(engine, 2.0)
    read = full_grad(engine)
    engine.step()
    norm = float(engine.get_global_grad_norm())
    update = masters(engine)[0] * -16
    engine.destroy()
    return read, update, norm


@pytest.mark.parametrize("accum", ["bf16", "fp32"])
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_a_gradient_set_between_requests_is_kept(
    two_ranks: RankGroup, stage: int, offload: bool, retain: bool, accum: str, last: bool
) -> None:
    setup = Setup(stage=stage, offload=offload, model="bf16", accum=accum, retain=retain)
    wanted = 5.0 if last else 7.0
    for read, update, norm in two_ranks.run(set_between_requests, setup, last):
        assert torch.equal(read, torch.full((8,), wanted))
        assert torch.equal(update, torch.full((8,), wanted))
        assert norm == pytest.approx(wanted * 8**0.5, rel=1e-6)


def absent_parameter_reads_zero(setup: Setup) -> list[torch.Tensor]:
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    engine = build(setup)
    backward(engine, Micro(ALL, 1))
    engine.step()
    before = masters(engine)
    backward(engine, Micro((True, False, True, True, True), 2))
    params = list(engine.module.parameters())
    read = [safe_get_full_grad(params[1]).cpu().clone()]
    safe_set_full_grad(params[1], torch.full_like(params[1], 3.0, dtype=torch.float32))
    backward(engine, Micro((True, False, True, True, True), 3))
    engine.step()
    read.append((before[1] - masters(engine)[1]) * 16)
    engine.destroy()
    return read


@pytest.mark.parametrize("accum", ["bf16", "fp32"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_an_absent_parameter_has_a_zero_gradient_that_can_be_set(
    two_ranks: RankGroup, stage: int, offload: bool, accum: str
) -> None:
    for zero, applied in two_ranks.run(
        absent_parameter_reads_zero, Setup(stage=stage, offload=offload, model="bf16", accum=accum)
    ):
        assert not zero.any()
        assert torch.equal(applied, torch.full_like(applied, 3.0))


def round_robin_weights(setup: Setup) -> tuple[list[float], list[float]]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    engine = build(setup, model=Numbered())
    params = list(engine.module.parameters())
    read = [safe_get_full_fp32_param(p)[0].item() for p in params]
    safe_set_full_fp32_param(params[1], torch.full((4,), 20.0))
    written = [safe_get_full_fp32_param(p)[0].item() for p in params]
    engine.destroy()
    return read, written


@pytest.mark.parametrize("offload", [False, True])
def test_master_weights_under_round_robin(two_ranks: RankGroup, offload: bool) -> None:
    setup = Setup(offload=offload, zero={"round_robin_gradients": True})
    assert two_ranks.run(round_robin_weights, setup) == [([1, 2, 3, 4], [1, 20, 3, 4])] * 2
