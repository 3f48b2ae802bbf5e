"""Copies between gradient partition and host gradient, when the partition stays, and that no weight depends on it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from requestzero.probe.counters import Allocations
from support.engines import build, masters
from support.logs import logged_by
from support.models import OneWeight, feed, full_grad
from support.ranks import RankGroup
from support.setup import AT_REQUEST_ENDS, Setup
from support.updates import run_windows
from support.windows import ALL, Micro, Window, backward, reference, wrong_updates

SOME = (True, False, True, False, True)  # every parameter of the first of two groups, none of the second
RELEASED = Setup(offload=True, model="bf16", accum="fp32")
PLENTY = 2**60


class HostTraffic(TorchDispatchMode):
    """Bytes of every copy into and out of host gradients; any other reader or writer of them is in ``others``."""

    def __init__(self, host: list[torch.Tensor]) -> None:
        super().__init__()
        self._host = {t.untyped_storage().data_ptr() for t in host}
        self.into: list[int] = []
        self.out: list[int] = []
        self.others: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        touched = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and self._is_host(t)]
        if name == "aten.copy_" and touched:
            (self.into if self._is_host(args[0]) else self.out).append(args[0].numel() * touched[0].element_size())
        elif touched:
            self.others.add(name)
        return func(*args, **(kwargs or {}))

    def _is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._host


def free_memory(values: Iterable[int]) -> Any:
    """Let the device's free memory be the next of ``values`` whenever a rank asks."""
    from requestzero.zero.stage_1_and_2.accumulators import retention as free_memory

    answers = iter(values)
    return patch.object(free_memory, "free_device_memory", lambda: next(answers))


def traffic_by_request(setup: Setup, requests: list[list[tuple[bool, ...]]]) -> tuple[list[Any], dict[str, int]]:
    """For every request the bytes of its copies, in and out, and the other uses; then the engine's own counts."""
    engine = build(setup)
    host = [p.grad for p in engine.optimizer.single_partition_of_fp32_groups]
    seen = []
    for number, request in enumerate(requests):
        with HostTraffic(host) as traffic:
            for position, uses in enumerate(request):
                backward(engine, Micro(uses, number, position == len(request) - 1))
        seen.append((traffic.into, traffic.out, traffic.others))
    counts = asdict(engine.partition_traffic)
    engine.step()
    engine.destroy()
    return seen, counts


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant"])
def test_copies_and_bytes_of_every_request(two_ranks: RankGroup, stage: int, checkpointing: str) -> None:
    at = AT_REQUEST_ENDS[stage]
    setup = replace(RELEASED, stage=stage, groups=2, checkpointing=checkpointing, at=at)
    for seen, counts in two_ranks.run(traffic_by_request, setup, [[ALL], [ALL, ALL, ALL], [SOME], [ALL, ALL]]):
        into, out, others = zip(*seen, strict=True)
        sizes = into[0]
        total = sum(sizes)
        assert len(sizes) == 2
        assert list(into) == [sizes, sizes, sizes[:1], sizes], (
            "a partition is copied to the host once, where it has changed"
        )
        assert list(out) == [[], sizes, sizes, sizes], "and reloaded once, whatever the number of micro-batches"
        assert set().union(*others) == set(), "nothing else touches the host gradient"
        assert counts == {
            "publications": 7,
            "published_bytes": 3 * total + sizes[0],
            "restores": 6,
            "restored_bytes": 3 * total,
            "early_restores": 6,
            "kept": 0,
            "released": 8,
        }


@pytest.mark.parametrize("announced", [True, False])
def test_a_partition_is_reloaded_ahead_where_requests_can_be_aborted(two_ranks: RankGroup, announced: bool) -> None:
    setup = replace(RELEASED, config={"requestzero": {"abort": True}})
    for early, restores in two_ranks.run(reloads, setup, announced):
        assert early == restores == 4


def reloads(setup: Setup, announced: bool) -> tuple[int, int]:
    """How often partitions were reloaded ahead of a reduction in five requests, and at all."""
    engine = build(setup)
    for number in range(5):
        if announced:
            engine.begin_request(number)
        backward(engine, Micro(ALL, number))
    counts = engine.partition_traffic
    engine.step()
    engine.destroy()
    return counts.early_restores, counts.restores


@pytest.mark.parametrize("stage", [1, 2])
def test_a_retained_partition_is_never_restored(two_ranks: RankGroup, stage: int) -> None:
    setup = replace(RELEASED, stage=stage, groups=2, retain=True, at=AT_REQUEST_ENDS[stage])
    for seen, counts in two_ranks.run(traffic_by_request, setup, [[ALL], [ALL, ALL], [SOME]]):
        assert [len(into) for into, _, _ in seen] == [2, 2, 1]
        assert [out for _, out, _ in seen] == [[], [], []]
        assert (counts["restores"], counts["kept"], counts["released"]) == (0, 6, 0)


# --- the decision ---------------------------------------------------------------------------------------------------


def automatic(free: list[int]) -> tuple[list[int], dict[str, int], list[str]]:
    """Bytes held after each of the requests, counts, and what was logged; one request for each of ``free``."""
    held = []
    with logged_by("requestzero", logging.INFO) as lines, free_memory([PLENTY, *free]):  # one when the engine is built
        engine = build(replace(RELEASED, retain="auto"))
        for seed in range(len(free)):
            backward(engine, Micro(ALL, seed))
            held.append(engine.grad_partition_bytes)
        engine.step()
        counts = asdict(engine.partition_traffic)
        engine.destroy()
    return held, counts, lines


def test_auto_keeps_the_partition_while_memory_suffices(two_ranks: RankGroup) -> None:
    partition = 4 * 38
    results = two_ranks.run(automatic, [PLENTY, PLENTY, 0, 0, PLENTY])
    for rank, (held, counts, lines) in enumerate(results):
        assert held == [partition, partition, 0, 0, partition], "one that was kept is released when memory is scarce"
        assert (counts["kept"], counts["released"], counts["restores"]) == (3, 2, 2)
        assert [line.split(" its gradient")[0] for line in lines] == [
            f"Rank {rank} keeps",
            f"Rank {rank} releases",
            f"Rank {rank} keeps",
        ], "once for every change"


class Memory:
    """A device of 1,000 bytes, of which the allocator has given out 300 and holds 200 more."""

    def __init__(self, free: int) -> None:
        self._free = free

    def device_name(self) -> str:
        return "another"

    def memory_allocated(self) -> int:
        return 300

    def memory_reserved(self) -> int:
        return 500

    def total_memory(self) -> int:
        return 1000

    def available_memory(self) -> int:
        return self._free


def test_what_counts_as_free() -> None:
    from requestzero.zero.stage_1_and_2.accumulators import retention as free_memory

    def on_device(free: int) -> Any:
        return patch.object(free_memory, "get_accelerator", lambda: Memory(free))

    with on_device(100):  # of the driver, others having 400
        assert free_memory.free_device_memory() == 300
    with on_device(700):  # without a driver to ask: total less allocated
        assert free_memory.free_device_memory() == 700
    with on_device(100), patch.object(free_memory.dist, "get_rank", lambda: 0):
        assert free_memory.MemoryWatch(50).margin == 100, "a tenth of the device's memory"
        assert free_memory.MemoryWatch(300).margin == 300, "or another partition"
        assert free_memory.MemoryWatch(300).suffices()
        assert not free_memory.MemoryWatch(301).suffices()


class Gpu(Memory):
    """The same on a GPU whose number DeepSpeed cannot read, since ``CUDA_VISIBLE_DEVICES`` names it by its UUID."""

    def device_name(self) -> str:
        return "cuda"

    def available_memory(self) -> int:
        return int("GPU-5a1c3f2e")


def test_of_a_gpu_pytorch_is_asked() -> None:
    from requestzero.zero.stage_1_and_2.accumulators import retention as free_memory

    with (
        patch.object(free_memory, "get_accelerator", lambda: Gpu(0)),
        patch.object(torch.cuda, "mem_get_info", lambda: (100, 1000)),
    ):
        assert free_memory.free_device_memory() == 300


# --- weights --------------------------------------------------------------------------------------------------------

WINDOWS: list[Window] = [
    [Micro(ALL, 1), Micro(SOME, 2, False), Micro(ALL, 3), Micro(SOME, 5)],
    [Micro(SOME, 6), Micro(SOME, 7)],
    [Micro(ALL, 8, False), Micro(SOME, 9), Micro((False, True, False, True, False), 10), Micro(ALL, 11)],
]
CHANGING = [0, PLENTY, PLENTY, 0, 0]
MODES: list[tuple[Any, list[int]]] = [(False, []), (True, []), ("auto", [0]), ("auto", [PLENTY]), ("auto", CHANGING)]
SETUPS = [
    replace(RELEASED, stage=1, at="request"),
    replace(RELEASED, stage=1, at="request", zero={"overlap_comm": True}),
    replace(RELEASED, groups=2, checkpointing="reentrant"),
    replace(RELEASED, groups=3, zero={"round_robin_gradients": True, "overlap_comm": True}),
    replace(RELEASED, stage=1, at="request", groups=2, zero={"reduce_bucket_size": 8, "allgather_bucket_size": 8}),
    replace(RELEASED, zero={"reduce_bucket_size": 8, "allgather_bucket_size": 8, "contiguous_gradients": False}),
]


def updates_in_every_mode(setup: Setup) -> list[list[list[torch.Tensor]]]:
    results = []
    for retain, free in MODES:
        with free_memory(itertools.cycle(free)) if free else nullcontext():
            results.append(run_windows(replace(setup, retain=retain), WINDOWS))
    return results


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_weights_are_the_same_wherever_the_partition_is(two_ranks: RankGroup, setup: Setup) -> None:
    expected = reference(WINDOWS, 2)
    for applied in two_ranks.run(updates_in_every_mode, setup):
        assert [wrong_updates(each, expected) for each in applied] == [0] * len(MODES)


# --- what comes between a forward and its backward ------------------------------------------------------------------


def set_after_a_forward(further: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum 1; a forward whose backward never comes; set to 5; then, if ``further``, a request of 2."""
    from deepspeed.utils import safe_set_full_grad

    engine = build(RELEASED, model=OneWeight())
    weight = engine.module.weight
    feed(engine, 1.0)
    engine(torch.full_like(weight, 3.0))
    safe_set_full_grad(weight, torch.full((8,), 5.0, device=engine.device))
    if further:
        feed(engine, 2.0)
    read = full_grad(engine)
    engine.step()
    update = masters(engine)[0] * -16
    engine.destroy()
    return read, update


@pytest.mark.parametrize("further", [False, True])
def test_a_gradient_set_after_a_forward_is_kept(two_ranks: RankGroup, further: bool) -> None:
    wanted = torch.full((8,), 7.0 if further else 5.0)
    for read, update in two_ranks.run(set_after_a_forward, further):
        assert torch.equal(read, wanted)
        assert torch.equal(update, wanted)


def forwards_without_backward() -> tuple[float, int, int]:
    """Two forwards, one of them without gradients, before a request of 2; then one before the step."""
    engine = build(RELEASED, model=OneWeight())
    x = torch.ones_like(engine.module.weight)
    feed(engine, 1.0)
    with torch.no_grad():
        engine(x)
    without_gradients = engine.grad_partition_bytes
    engine(x)
    feed(engine, 2.0)
    engine(x)
    engine.step()
    result = float(masters(engine)[0][0]) * -16, without_gradients, engine.partition_traffic.restores
    engine.destroy()
    return result


def test_forwards_without_a_backward_change_nothing(two_ranks: RankGroup) -> None:
    assert two_ranks.run(forwards_without_backward) == [(3.0, 0, 2)] * 2


def dropped_request() -> tuple[list[float], int, int]:
    """Requests of 1, infinity and 2 with ``drop_request``: the update, the bytes that were copied, the drops."""
    engine = build(replace(RELEASED, config={"overflow": {"on_overflow": "drop_request"}}), model=OneWeight())
    feed(engine, 1.0)
    feed(engine, float("inf"))
    feed(engine, 2.0)
    copied = engine.request_backup_bytes
    engine.step()
    result = (masters(engine)[0] * -16).tolist(), copied, engine.dropped_requests
    engine.destroy()
    return result


def test_a_request_is_dropped_from_a_restored_partition(two_ranks: RankGroup) -> None:
    """The sum without the request is still in the host gradient, which gets a sum once it has been checked."""
    assert two_ranks.run(dropped_request) == [([3.0] * 8, 0, 1)] * 2


# --- memory ---------------------------------------------------------------------------------------------------------

SIZE = 2**16


def peak_of_a_window(early: bool) -> int:
    """The most that operators had allocated at once in the forwards and backwards of three requests."""
    # A bucket no larger than the model: DeepSpeed's default of a gigabyte would hide everything else.
    engine = build(replace(RELEASED, zero={"reduce_bucket_size": SIZE}), model=WideForward(SIZE))
    x = torch.ones_like(engine.module.weight)
    allocations = Allocations()
    with patch.object(type(engine.optimizer.sums), "prefetch", lambda self: None) if not early else nullcontext():
        for _ in range(3):  # of one micro-batch: later ones of a request find the partition there
            engine.set_gradient_accumulation_boundary(True)
            with allocations:
                engine.backward(engine(x))
    assert engine.partition_traffic.early_restores == 2 * early
    engine.destroy()
    return allocations.peak_bytes


class WideForward(OneWeight):
    """Its forward needs more memory than its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.zeros(64 * len(x)).sum()


def test_an_early_restore_does_not_raise_the_peak(one_rank: RankGroup) -> None:
    early, lazy = (one_rank.run(peak_of_a_window, early)[0] for early in (True, False))
    assert early == lazy >= 4 * 64 * SIZE


# --- pinned memory --------------------------------------------------------------------------------------------------


def pinned(section: dict[str, Any]) -> bool:
    """Return true if the host gradient is memory that the accelerator was asked to pin."""
    from deepspeed.accelerator import get_accelerator

    made: set[int] = set()

    def pin_memory(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made.add(tensor.data_ptr())
        return tensor

    zero = {"offload_optimizer": {"device": "cpu", **section}}
    with patch.object(type(get_accelerator()), "pin_memory", pin_memory):
        engine = build(Setup(model="bf16", accum="fp32", zero=zero), model=OneWeight())
    result = engine.optimizer.single_partition_of_fp32_groups[0].grad.data_ptr() in made
    engine.destroy()
    return result


def test_the_host_gradient_is_pinned_unless_the_config_says_no(one_rank: RankGroup) -> None:
    """DeepSpeed's default, without which no copy would run beside the forward."""
    assert [one_rank.run(pinned, each)[0] for each in ({}, {"pin_memory": False})] == [True, False]
