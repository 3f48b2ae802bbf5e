"""What only a GPU has: pinned memory, streams, ``"auto"``, the memory of a released partition, a shared device."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from requestzero.doctor.verify.life_cycle import on_all_ranks
from requestzero.doctor.verify.result import Check
from requestzero.doctor.verify.setup import Setup
from requestzero.doctor.verify.slow_windows import (
    PARAMETERS,
    SETUP,
    STAGE_3,
    LateCopies,
    slow_backward,
    slow_engine,
    slow_window,
)


def check_gpu(report: Callable[[str], None], stage_3: bool) -> list[Check]:
    """Run the checks; return the same on every rank (collective).

    Args:
        report: called with the name of the next check.
        stage_3: also with ZeRO 3.
    """
    checks: dict[str, Callable[[], bool]] = {
        "host gradients are in pinned memory": _is_pinned,
        "streams wait for each other, released": partial(_streams, SETUP),
        "streams wait for each other, retained": partial(_streams, replace(SETUP, retain=True)),
        "streams wait for each other, auto": partial(_streams, replace(SETUP, retain="auto")),
        "streams wait for each other, overlap_comm": partial(_streams, SETUP, overlap_comm=True),
        "streams wait for each other, bf16 sum": partial(_streams, replace(SETUP, accum="bf16"), overlap_comm=True),
        **({"streams wait for each other, stage 3": partial(_streams, STAGE_3)} if stage_3 else {}),
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
    report("host waits")
    return [*found, _host_waits()]


def _is_pinned() -> bool:
    from deepspeed.accelerator import get_accelerator

    with slow_engine(SETUP) as engine:
        hosts = [master.grad for master in engine.optimizer.single_partition_of_fp32_groups]
        return all(host is not None and get_accelerator().is_pinned(host) for host in hosts)


def _streams(setup: Setup, **zero: Any) -> bool:
    with slow_engine(setup, **zero) as engine:
        return all([slow_window(engine, seed, LateCopies()) for seed in range(2)])


def _prefetches() -> bool:
    with slow_engine(SETUP) as engine:
        exact = slow_window(engine, seed=4)
        traffic = engine.partition_traffic
        # Three requests, of which each but the first reloads the partition: before its first reduction.
        return exact and traffic.early_restores == traffic.restores > 0


def _keeps() -> bool:
    with slow_engine(replace(SETUP, retain="auto")) as engine:
        return slow_window(engine, seed=5) and engine.partition_traffic.released == 0


def _releases() -> bool:
    """Take the memory until a twentieth of it is free; "auto" wants a tenth."""
    with slow_engine(replace(SETUP, retain="auto")) as engine:
        if not slow_window(engine, seed=6):  # what a window allocates once is there now
            return False
        free, total = torch.cuda.mem_get_info()
        taken = torch.empty(max(0, free - total // 20), dtype=torch.uint8, device="cuda")
        exact = slow_window(engine, seed=7)
        del taken
        return exact and engine.partition_traffic.released > 0


def _frees() -> bool:
    partition = 4 * PARAMETERS // dist.get_world_size()
    return _allocated_between_requests(True) - _allocated_between_requests(False) >= partition


def _allocated_between_requests(retain: bool) -> int:
    gc.collect()  # what is left of earlier engines
    before = torch.cuda.memory_allocated()
    with slow_engine(replace(SETUP, retain=retain)) as engine:
        slow_window(engine, seed=8)
        slow_backward(engine, seed=900, end=True)
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
        engine.zero_grad()
    return allocated - before


def _host_waits() -> Check:
    """Return the number of operations for which the host waits. An error costs the other results nothing."""
    try:
        detail = f"{_count_host_waits()}, with those of the inputs"
    except Exception as error:  # only measured
        detail = f"not counted: {type(error).__name__}: {error}"
    return Check("host waits in two backwards", None, detail)


def _count_host_waits() -> int:
    """Count those of two backwards, DeepSpeed's own included."""
    with slow_engine(SETUP) as engine:
        slow_window(engine, seed=9)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                slow_backward(engine, seed=901, end=False)
                slow_backward(engine, seed=902, end=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        engine.zero_grad()
    return sum("synchroniz" in str(each.message) for each in caught)


def cannot_communicate() -> Check | None:
    """Return why ranks that share a GPU cannot communicate here, ``None`` where they can (collective)."""
    try:
        value = torch.ones(4, device="cuda")
        dist.all_reduce(value)
        dist.broadcast(value, 0)
        dist.reduce(value, 0)
        parts = torch.empty(4 * dist.get_world_size(), device="cuda")
        dist.all_gather_into_tensor(parts, value)
        dist.all_to_all_single(torch.empty_like(parts), parts)
        dist.reduce_scatter_tensor(value, parts)
        torch.cuda.synchronize()
    except (RuntimeError, NotImplementedError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Check("two ranks on one GPU", None, f"not possible with this backend: {reason}")
    return None
