"""Scenarios for the tests of the agreement of ranks; every function runs on all ranks."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from support.engines import build
from support.polling import polling_every
from support.setup import Setup
from support.windows import ALL, Micro, backward


@dataclass
class Outcome:
    """The end of a scenario on one rank."""

    error: str
    text: str
    again: str
    """What the engine said when it was used once more."""
    seconds: float


def rank() -> int:
    import deepspeed.comm as dist

    return int(dist.get_rank())


def outcome(scenario: Callable[..., None], *args: Any, setup: Setup | None = None, poll_every: float = 0.2) -> Outcome:
    """Of ``scenario(engine, *args)``; ranks look at each other every ``poll_every`` seconds (else every second)."""
    with polling_every(poll_every):
        engine = build(Setup() if setup is None else setup)
        start = time.monotonic()
        try:
            scenario(engine, *args)
        except Exception as error:
            seconds = time.monotonic() - start
            return Outcome(type(error).__name__, str(error), use_again(engine), seconds)
        finally:
            engine.destroy()
        return Outcome("", "", "", time.monotonic() - start)


def use_again(engine: Any) -> str:
    try:
        engine.begin_request("again")
    except Exception as error:
        return str(error)
    return ""


def request(
    engine: Any,
    micro_batches: int,
    name: str | None = None,
    announced: int | bool | None = None,
    window_end: bool | None = True,
    uses: tuple[bool, ...] = ALL,
) -> None:
    """A request; ``announced``: as so many micro-batches, ``False``: not at all."""
    if announced is not False:
        engine.begin_request(name, micro_batches=announced or micro_batches, window_end=window_end)
    for position in range(micro_batches):
        backward(engine, Micro(uses, position, position == micro_batches - 1))


def step(engine: Any) -> None:
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def announced_unevenly(engine: Any) -> None:
    request(engine, 2, "even")
    step(engine)
    request(engine, 3 - rank(), "uneven")


def unannounced_unevenly(engine: Any) -> None:
    request(engine, 2, announced=False)
    step(engine)
    request(engine, 3 - rank(), announced=False)
    step(engine)


def unannounced_and_checked(engine: Any) -> None:
    """An uneven request whose end is collective by itself."""
    request(engine, 3 - rank(), announced=False)


def fewer_than_announced(engine: Any) -> None:
    request(engine, 3, "even")
    step(engine)
    request(engine, 3 - rank(), "broken", announced=3)
    step(engine)


def other_names(engine: Any) -> None:
    request(engine, 1, f"name {rank()}")


def one_steps(engine: Any) -> None:
    request(engine, 1, "first", window_end=None)
    if rank() == 1:
        step(engine)
    request(engine, 1, "second", window_end=None)


def one_has_no_data(engine: Any) -> None:
    for name in ("first", "second")[: 2 - rank()]:
        request(engine, 1, name)
        step(engine)
    engine.end_data()


def loader_fails_between(engine: Any) -> None:
    with engine.data_pass():
        request(engine, 1, "first")
        step(engine)
        if rank() == 1:
            raise OSError("the disk is gone")
        request(engine, 1, "second")


def loader_fails_within(engine: Any) -> None:
    with engine.data_pass():
        engine.begin_request("long", micro_batches=3)
        for position in range(3):
            if rank() == 1 and position == 1:
                raise OSError("the disk is gone")
            backward(engine, Micro(ALL, position, position == 2))


def all_fail(engine: Any) -> None:
    with engine.data_pass():
        request(engine, 1, "first")
        raise KeyError(f"on rank {rank()}")


def others_do_not_hear(engine: Any) -> None:
    """Rank 0 computes while rank 1 fails and gives up; it learns of it when it comes to a collective."""
    from requestzero.rank_check import comparison, watch

    comparison._FAILURE_GRACE_PERIOD = 0.5
    watch._GRACE_PERIOD = 4.0
    engine.begin_request("long")
    if rank() == 1:
        engine.fail(OSError("the disk is gone"))
    time.sleep(2.0)
    backward(engine, Micro(ALL, 0))


def one_fails_in_its_step(engine: Any) -> None:
    """The user's optimizer raises; the other rank gathers the weights of both."""
    request(engine, 1, "first")
    step(engine)
    request(engine, 1, "second")
    if rank() == 1:
        engine.optimizer.optimizer.step = _fails
    step(engine)


def _fails(*args: Any, **kwargs: Any) -> None:
    raise OSError("the disk is gone")


def all_fail_in_their_step(engine: Any) -> None:
    request(engine, 1, "first")
    engine.optimizer.optimizer.step = _fails
    step(engine)


def one_fails_in_its_save(engine: Any, folder: str) -> None:
    """Its part of a checkpoint does not fit on the disk; the other rank waits in DeepSpeed's barrier."""
    request(engine, 1, "first")
    step(engine)
    if rank() == 1:
        engine.checkpoint_engine.save = _fails
    engine.save_checkpoint(folder)


def one_fails_in_its_load(engine: Any, folder: str) -> None:
    """Its file is damaged; the other rank trains on."""
    request(engine, 1, "first")
    step(engine)
    engine.save_checkpoint(folder)
    if rank() == 1:
        engine.checkpoint_engine.load = _fails
    engine.load_checkpoint(folder)
    request(engine, 1, "second")


def one_file_is_damaged(engine: Any, folder: str) -> None:
    """A bit of a weight, or of a moment, has changed since it was saved."""
    import torch.distributed as dist

    from requestzero.faults.combination import Fault
    from requestzero.faults.damage import damage_newest

    request(engine, 1, "first")
    step(engine)
    engine.save_checkpoint(folder)
    if rank() == 0:
        damage_newest(Path(folder), Fault.CHANGED, rank=1)
    dist.barrier()
    engine.load_checkpoint(folder)
    request(engine, 1, "second")


def crossed_engines(engine: Any) -> None:
    """Two engines, which the ranks use in another order."""
    second = build(Setup())
    engines = [engine, second]
    for each in engines:
        request(each, 1, "even")
        step(each)
    try:
        for each in engines if rank() == 0 else reversed(engines):
            request(each, 1, "crossed")
    finally:
        second.destroy()


def slow_engines() -> int:
    """Updates of an engine beside another, which is destroyed first, where one of the ranks is slow."""
    engine, second = build(Setup()), build(Setup())
    for name in ("a", "b"):
        for each in (engine, second):
            time.sleep(1.0 if rank() == 1 else 0.0)
            request(each, 1, name)
            step(each)
    second.destroy()
    time.sleep(1.0 if rank() == 1 else 0.0)
    request(engine, 1, "c")
    step(engine)
    applied = engine.applied_updates
    engine.destroy()
    return int(applied)


def timeouts() -> list[float]:
    """Of the process group that the user has made, and of the engine's waits, in seconds."""
    import torch.distributed as dist

    engine = build(Setup())
    given = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    engine.destroy()
    return [given, engine.agreement._watch._longest_wait]


def one_leaves_out(engine: Any) -> None:
    engine.begin_request("a", micro_batches=1, window_end=True)
    if rank() == 1:
        engine.skip_micro_batch("training_step returned None")
    else:
        backward(engine, Micro(ALL, 0))
    step(engine)


def other_parameters(engine: Any, from_the_first: bool) -> None:
    if not from_the_first:
        request(engine, 2, "even")
    used = (True, rank() == 0, True, rank() == 1, True)
    request(engine, 1, "branches", uses=used)


def one_destroys(engine: Any) -> None:
    request(engine, 1, "first")
    if rank() == 1:
        engine.destroy()
        raise SystemError("done")
    request(engine, 1, "second")


def one_dies() -> None:
    engine = build(Setup())
    request(engine, 1, "first")
    if rank() == 1:
        os._exit(3)
    request(engine, 1, "second")


def one_begins_twice(engine: Any) -> None:
    engine.begin_request("a", micro_batches=2)
    backward(engine, Micro(ALL, 0, False))
    if rank() == 1:
        engine.begin_request("b")
    backward(engine, Micro(ALL, 1))


def one_saves(engine: Any) -> None:
    request(engine, 1, "first")
    step(engine)
    if rank() == 1:
        engine.save_checkpoint("never written")
    request(engine, 1, "second")


def one_loads(engine: Any) -> None:
    request(engine, 1, "first")
    step(engine)
    if rank() == 1:
        engine.load_checkpoint("never read")
    request(engine, 1, "second")


def other_tags(engine: Any) -> None:
    engine.load_checkpoint("never read", tag=f"step {rank()}")


def other_latest_tags(engine: Any) -> None:
    """Nodes with disks of their own, of which one has missed the last save."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "latest").write_text(f"step {rank()}")
        engine.load_checkpoint(folder)


def one_has_no_checkpoint(engine: Any) -> None:
    """A disk of its own that is empty."""
    with tempfile.TemporaryDirectory() as folder:
        if rank() == 0:
            Path(folder, "latest").write_text("step 0")
        engine.load_checkpoint(folder)


def one_discards(engine: Any) -> None:
    request(engine, 1, "first", window_end=None)
    if rank() == 1:
        engine.zero_grad()
    request(engine, 1, "second")


def one_is_slow(engine: Any) -> None:
    request(engine, 2, "at once")
    step(engine)
    time.sleep(5.0 if rank() == 1 else 0.0)
    request(engine, 2, "slow", window_end=None)
    time.sleep(0.0 if rank() == 1 else 2.5)
    step(engine)
    engine.end_data()


def all_change(engine: Any) -> None:
    """Whatever all ranks do alike is allowed, announced or not."""
    request(engine, 2, "shorter", announced=3)
    step(engine)
    request(engine, 3, "longer", announced=2)
    engine.begin_request("never comes")
    engine.skip_micro_batch("nothing to learn", request_end=True)
    request(engine, 1, announced=False, uses=(True, False, True, False, False))
    request(engine, 1, announced=False, uses=(False, True, False, True, True))
    step(engine)
    engine.begin_request("discarded", micro_batches=2)
    backward(engine, Micro(ALL, 0, False))
    engine.zero_grad()
    request(engine, 1, "after")
    step(engine)
    engine.end_data()


def rounds_of(setup: Setup, requests: int) -> tuple[int, int]:
    """Agreements of announced requests, and of others, after the first has made the order known."""
    engine = build(setup)
    channel = engine.agreement._channel
    request(engine, 2, "first")
    step(engine)
    before = channel.rounds
    for name in range(requests):
        request(engine, 2, str(name))
        step(engine)
    between = channel.rounds
    for _ in range(requests):
        request(engine, 2, announced=False)
        step(engine)
    after = channel.rounds
    engine.destroy()
    return between - before, after - between


def left_behind(engines: int) -> tuple[int, int]:
    """Threads and process groups more than before, after so many engines have been built, used and destroyed."""
    import gc

    import torch.distributed as dist

    def count() -> tuple[int, int]:
        gc.collect()
        time.sleep(0.2)
        return len(os.listdir("/proc/self/task")), len(dist.distributed_c10d._world.pg_map)

    build(Setup()).destroy()
    before = count()
    for _ in range(engines):
        engine = build(Setup())
        request(engine, 1, "a")
        step(engine)
        engine.destroy()
    del engine
    after = count()
    return after[0] - before[0], after[1] - before[1]


def without_agreement() -> bool:
    """As before: nothing is agreed on, and equal ranks train."""
    setup = Setup(config={"requestzero": {"rank_agreement": False}})
    engine = build(setup)
    request(engine, 2, f"name {rank()}")
    step(engine)
    with engine.data_pass():
        request(engine, 1, announced=False)
    active = engine.agreement.active or engine.optimizer.ranks.comm is not __import__("deepspeed").comm
    engine.destroy()
    return not active


def stock_pairs(same_size: bool) -> list[float]:
    """DeepSpeed alone, a model of two layers of which each rank uses another: the first rows that are applied."""
    import deepspeed

    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(2, out, bias=False) for out in (3, 3 if same_size else 5))

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers
            for parameter in self.parameters():
                torch.nn.init.zeros_(parameter)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[rank()](x).sum()

    module = Branches()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    config = Setup().deepspeed_config(requestzero=False)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.full((2,), 2.0 + 2 * rank())))
    engine.step()
    return [-float(layer.weight[0, 0].detach()) for layer in layers]
