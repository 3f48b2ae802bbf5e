"""What only a GPU has: pinned memory, streams, ``"auto"``, the memory of a released partition, the probe's columns."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from requestzero.doctor.verify.life_cycle import on_all_ranks
from requestzero.doctor.verify.result import Check
from requestzero.doctor.verify.setup import Setup
from requestzero.doctor.verify.training import build

_LAYERS, _WIDTH = 8, 1024
_PARAMETERS = _LAYERS * _WIDTH**2
_SLEEP = 20_000_000  # cycles, about 10 ms: many times what a backward of a layer takes
_LATE_BYTES = 256 * 2**20
_LATE_COPIES = 100  # about a second at 25 GB/s


class SlowChain(torch.nn.Module):
    """Layers that stay the identity, whose backwards wait before each layer.

    The gradient of each layer is then exact: the outer product of ones and the sum of the inputs. What a stream fails
    to wait for is seen, since the other streams are far ahead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS))
        for param in self.parameters():
            torch.nn.init.eye_(param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(_wait_on_the_device)
        return x.sum()


def _wait_on_the_device(gradient: torch.Tensor) -> None:
    torch.cuda._sleep(_SLEEP)  # type: ignore[no-untyped-call]


def check_gpu(report: Callable[[str], None]) -> list[Check]:
    """Run the checks; return the same on every rank (collective)."""
    checks: dict[str, Callable[[], bool]] = {
        "host gradients are in pinned memory": _is_pinned,
        "streams wait for each other, released": partial(_streams, False),
        "streams wait for each other, retained": partial(_streams, True),
        "streams wait for each other, auto": partial(_streams, "auto"),
        "streams wait for each other, overlap_comm": partial(_streams, False, overlap_comm=True),
        "a released partition is prefetched": _prefetches,
        "auto keeps partitions while memory is free": _keeps,
        "auto releases them when memory is short": _releases,
        "a released partition frees its memory": _frees,
    }
    found = []
    for name, check in checks.items():
        report(name)
        found.append(on_all_ranks(name, check))
        gc.collect()
        torch.cuda.empty_cache()
    return [*found, _host_waits()]


@contextmanager
def _built(retain: bool | str, **zero: Any) -> Iterator[Any]:
    """Build an engine with a learning rate of zero, so that the layers stay as they are."""
    setup = Setup(stage=2, offload=True, model="bf16", accum="fp32", retain=retain, zero=zero)
    engine = build(setup, model=SlowChain(), lr=0.0)
    try:
        yield engine
    finally:
        engine.destroy()


def _backward(engine: Any, seed: int, end: bool) -> torch.Tensor:
    """Run one micro-batch of small whole numbers; return the sum of its inputs over all ranks."""
    ranks = dist.get_world_size()
    inputs = [torch.randint(-2, 3, (1, _WIDTH), generator=_generator(seed, rank)) for rank in range(ranks)]
    engine.set_gradient_accumulation_boundary(end)
    mine = inputs[dist.get_rank()] * ranks  # the mean over ranks is exact
    engine.backward(engine(mine.to(engine.device, torch.bfloat16)))
    return torch.stack(inputs).sum(0).double()


def _generator(seed: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1009 * seed + rank)


def _window(engine: Any, seed: int, requests: int = 3) -> bool:
    """Run a window of requests of two micro-batches; return whether every sum is exact."""
    from deepspeed.utils import safe_get_full_grad

    expected = torch.zeros(1, _WIDTH, dtype=torch.float64)
    for micro in range(2 * requests):
        expected += _backward(engine, 100 * seed + micro, end=micro % 2 == 1)
    sums = [safe_get_full_grad(param) for param in engine.module.parameters()]
    exact = all(torch.equal(each.double().cpu(), expected.expand(_WIDTH, -1)) for each in sums if each is not None)
    engine.step()
    return exact and all(each is not None for each in sums)


def _is_pinned() -> bool:
    from deepspeed.accelerator import get_accelerator

    with _built(False) as engine:
        hosts = [master.grad for master in engine.optimizer.single_partition_of_fp32_groups]
        return all(host is not None and get_accelerator().is_pinned(host) for host in hosts)


def _streams(retain: bool | str, **zero: Any) -> bool:
    with _built(retain, **zero) as engine, _busy_copies():
        return all([_window(engine, seed) for seed in range(3)])


@contextmanager
def _busy_copies() -> Iterator[None]:
    """Keep the copy engines of both directions busy, so that copies of partitions are late."""
    on_host = torch.empty(_LATE_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(_LATE_BYTES, dtype=torch.uint8, device="cuda")
    pairs = [(on_device, on_host), (torch.empty_like(on_host, pin_memory=True), torch.empty_like(on_device))]
    streams = [torch.cuda.Stream() for _ in pairs]  # type: ignore[no-untyped-call]
    for stream, (target, source) in zip(streams, pairs, strict=True):
        stream.wait_stream(torch.cuda.current_stream())  # which may still use the memory that was given out
        with torch.cuda.stream(stream):
            for _ in range(_LATE_COPIES):
                target.copy_(source, non_blocking=True)
    try:
        yield
    finally:  # the memory goes back to the stream that it was given out on
        for stream in streams:
            stream.synchronize()


def _prefetches() -> bool:
    with _built(False) as engine:
        exact = _window(engine, seed=4)
        traffic = engine.partition_traffic
        # Three requests, of which each but the first reloads the partition: before its first reduction.
        return exact and traffic.early_restores == traffic.restores > 0


def _keeps() -> bool:
    with _built("auto") as engine:
        return _window(engine, seed=5) and engine.partition_traffic.released == 0


def _releases() -> bool:
    """Take the memory until a twentieth of it is free; "auto" wants a tenth."""
    with _built("auto") as engine:
        if not _window(engine, seed=6):  # what a window allocates once is there now
            return False
        free, total = torch.cuda.mem_get_info()
        taken = torch.empty(max(0, free - total // 20), dtype=torch.uint8, device="cuda")
        exact = _window(engine, seed=7)
        del taken
        return exact and engine.partition_traffic.released > 0


def _frees() -> bool:
    partition = 4 * _PARAMETERS // dist.get_world_size()
    return _allocated_between_requests(True) - _allocated_between_requests(False) >= partition


def _allocated_between_requests(retain: bool) -> int:
    gc.collect()  # what is left of earlier engines
    before = torch.cuda.memory_allocated()
    with _built(retain) as engine:
        _window(engine, seed=8)
        _backward(engine, seed=900, end=True)
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
        engine.zero_grad()
    return allocated - before


def _host_waits() -> Check:
    """Count the operations of two backwards for which the host waits, DeepSpeed's own included."""
    with _built(False) as engine:
        _window(engine, seed=9)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _backward(engine, seed=901, end=False)
                _backward(engine, seed=902, end=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        engine.zero_grad()
    waits = [str(each.message) for each in caught if "synchroniz" in str(each.message)]
    return Check("host waits in two backwards", None, f"{len(waits)}, with those of the inputs")


def measure_columns(ranks: int, report: Callable[[str], None]) -> tuple[list[Check], list[dict[str, Any]]]:
    """Run the probe with all its columns on this rank; return whether they are filled, and its rows (collective)."""
    from requestzero.probe.measure import measure_all
    from requestzero.probe.models import ModelChoice
    from requestzero.probe.options import COLUMNS, DEFAULT_OUT, Options

    options = Options(
        ranks=ranks,
        device="cuda",
        model=ModelChoice(_LAYERS, _WIDTH),
        dtype="bf16",
        windows=6,
        timed_windows=8,
        requests=2,
        columns=tuple(COLUMNS),
        full=False,
        only="",
        seed=0,
        out=DEFAULT_OUT,
        html=None,
    )
    rows = measure_all(options, report)
    ours = [row for row in rows if row.engine.requestzero]
    errors = [f"{row.configuration}, {row.engine}: {text}" for row in ours for text in row.errors.values()]
    wrong = sum(row.values.get("wrong_updates", 0) for row in ours)
    filled = all(row.values.get(name, 0) > 0 for row in ours for name in _MEASURED_ON_CUDA)
    checks = [
        Check("the probe runs every configuration", not errors, "; ".join(errors)),
        Check("the probe finds no wrong update", wrong == 0, f"{wrong} wrong" if wrong else ""),
        Check("the probe's columns of memory and time are filled", filled),
    ]
    return checks, [row.record() for row in rows]


_MEASURED_ON_CUDA = ("bytes_between_requests", "bytes_at_peak", "backward_seconds", "boundary_seconds", "step_seconds")


def cannot_communicate() -> Check | None:
    """Return why ranks that share a GPU cannot communicate here, ``None`` where they can (collective)."""
    try:
        value = torch.ones(4, device="cuda")
        dist.all_reduce(value)
        dist.broadcast(value, 0)
        dist.reduce(value, 0)
        parts = torch.empty(4 * dist.get_world_size(), device="cuda")
        dist.all_gather_into_tensor(parts, value)
        dist.reduce_scatter_tensor(value, parts)
        torch.cuda.synchronize()
    except (RuntimeError, NotImplementedError) as error:
        return Check("two ranks on one GPU", None, f"not possible with this backend: {str(error).splitlines()[0]}")
    return None
