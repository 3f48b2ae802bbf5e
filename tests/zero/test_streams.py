"""The order of copies, events and waits on a device with streams, recorded on the CPU with a stand-in accelerator.

No arithmetic depends on it here; what is checked is that every asynchronous copy is followed by an event, and
that whatever would collide with the copy waits for that event first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from requestzero.zero.stage_1_and_2.bucket_runs import Piece, Run
from support.engines import build
from support.grid import every_sum
from support.poison import interrupt_backward
from support.ranks import RankGroup
from support.setup import AT_REQUEST_ENDS, Setup
from support.windows import ALL, Micro, backward


class Stream:
    """Stands for a stream; it asks an event or another stream to be waited for."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._log, self._name = recorder.log, name

    def __str__(self) -> str:
        return self._name

    def wait_event(self, event: Any) -> None:
        self._log.append(f"wait on {self} for {event}")

    def wait_stream(self, stream: Any) -> None:
        self._log.append(f"wait on {self} for {stream}")


class Event:
    def __init__(self, recorder: Recorder) -> None:
        self._log, self._stream = recorder.log, ""

    def __str__(self) -> str:
        return f"event on {self._stream}"

    def record(self, stream: Any) -> None:
        self._stream = str(stream)
        self._log.append(str(self))

    def synchronize(self) -> None:
        self._log.append("host waits")


class Recorder(TorchDispatchMode):
    """Logs what happens to partitions and host gradients, and what the stand-ins for stream and event are asked.

    Args:
        host: the host gradients. A partition is what has as many elements as one of them, in fp32.
    """

    def __init__(self, host: list[torch.Tensor]) -> None:
        super().__init__()
        self.log: list[str] = []
        self._host = {t.untyped_storage().data_ptr() for t in host}
        self._sizes = {t.numel() for t in host}
        self._partitions: set[int] = set()
        self.stream: Any = Stream(self, "main")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name == "aten.copy_":
            into, source = (t.untyped_storage().data_ptr() in self._host for t in args[:2])
            if into or source:
                self._note("publish" if into else "restore")
        if name == "aten.add_" and args[0].untyped_storage().data_ptr() in self._partitions:
            self._note("add")
        result = func(*args, **(kwargs or {}))
        is_partition = name in ("aten.empty", "aten.zeros") and result.dtype == torch.float32
        if is_partition and result.numel() in self._sizes:
            self._partitions.add(result.untyped_storage().data_ptr())
            if name == "aten.empty":
                self._note("allocate")
                weakref.finalize(result, self._note, "free")
        return result

    def _note(self, what: str) -> None:
        self.log.append(f"{what} on {self.stream}")

    @contextmanager
    def current(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def accelerator(self) -> Iterator[None]:
        """While the block runs, the accelerator has streams, and this records."""
        from deepspeed.accelerator import get_accelerator

        kind = type(get_accelerator())
        with (
            patch.object(kind, "resolves_data_dependency", lambda _: False),
            patch.object(kind, "is_pinned", lambda _, tensor: True),
            patch.object(kind, "Event", lambda _: Event(self)),
            patch.object(kind, "Stream", lambda _: Stream(self, "traffic")),
            patch.object(kind, "stream", lambda _, stream: self.current(stream)),
            patch.object(kind, "current_stream", lambda _, index=None: self.stream),
            patch.object(torch.Tensor, "record_stream", lambda tensor, stream: self.log.append("kept alive")),
            self,
        ):
            yield


@contextmanager
def recorded_engine(setup: Setup, requestzero: bool = True) -> Iterator[tuple[Any, list[str]]]:
    """An engine and the log of what it does, without the reduction's own events."""
    engine = build(setup, requestzero)
    recorder = Recorder([p.grad for p in engine.optimizer.single_partition_of_fp32_groups])
    # The buckets of DeepSpeed's own optimizer have producer events (0.19.6: none).
    name = "_record_bucket_producer"
    no_bucket_events = patch.object(type(engine.optimizer), name, lambda self, bucket: None, create=True)
    try:
        with no_bucket_events, recorder.accelerator():
            yield engine, recorder.log
    finally:
        engine.destroy()


def recorded(setup: Setup, ends: list[bool], requestzero: bool = True) -> list[list[str]]:
    """Per backward, then for the step: what happened."""
    parts = []
    with recorded_engine(setup, requestzero) as (engine, log):
        for seed, end in enumerate(ends):
            backward(engine, Micro(ALL, seed, end))
            parts.append(log[:])
            log.clear()
        engine.step()
        parts.append(log[:])
    return parts


def order(log: list[str], *kinds: str) -> list[str]:
    """The entries of these kinds, without their stream."""
    return [kind for entry in log if (kind := entry.split(" on ")[0]) in kinds]


@pytest.mark.parametrize("stage", [1, 2])
def test_release_and_restore_are_ordered(one_rank: RankGroup, stage: int) -> None:
    setup = Setup(stage=stage, offload=True, model="bf16", accum="fp32", at=AT_REQUEST_ENDS[stage])
    first, second, third, step = one_rank.run(recorded, setup, [True, True, True])[0]
    # The freed partition stays allocated until its copy is done, and an event marks that copy.
    tail = [entry for entry in first[first.index("publish on traffic") :] if entry != "event on main"]  # of the bucket
    assert tail == ["publish on traffic", "kept alive", "event on traffic"]
    # The partition comes back while the host goes on, after the publication and after whoever had its memory. That of a
    # window's first request is made on the stream of the copies.
    for log, publishing in ((second, "traffic"), (third, "main")):
        assert [entry for entry in log if not entry.startswith("host waits")][:5] == [
            "allocate on main",
            "wait on traffic for main",
            f"wait on traffic for event on {publishing}",
            "restore on traffic",
            "event on traffic",
        ]
    adding, ready = second.index("add on main"), second.index("wait on main for event on traffic")
    assert ready < adding, "nothing is added before the copy is done"
    copies = order(second, "publish", "restore", "add")
    assert copies.count("publish") == copies.count("restore") == 1
    assert copies[-1] == "publish"
    assert order(step, "host waits") == ["host waits"], "the optimizer reads the host gradient after the last copy"


SMALL = {"reduce_bucket_size": 8}  # several buckets


@pytest.mark.parametrize("stage", [1, 2])
def test_a_bucket_is_copied_beside_the_next_reduction(one_rank: RankGroup, stage: int) -> None:
    """On a stream of its own behind what has completed it; the host waits once, and not before the step."""
    setup = Setup(stage=stage, offload=True, model="bf16", accum="fp32", at="window", zero=SMALL)
    *backwards, step = one_rank.run(recorded, setup, [True, True])[0]
    assert [order(each, "publish", "host waits") for each in backwards] == [[], []]
    adding = [index for index, entry in enumerate(step) if entry == "add on main"]
    assert len(adding) > 2
    for index in adding:
        assert step[index + 1 : index + 5] == [
            "wait on traffic for main",
            "publish on traffic",
            "kept alive",
            "event on traffic",
        ]
    assert order(step, "publish", "add", "host waits") == ["add", "publish"] * len(adding) + ["host waits"]
    assert "restore" not in str(step)


def two_parts_of_a_gradient(setup: Setup) -> list[str]:
    """Two gradients of one parameter within a backward, in a bucket each, as from two checkpointed segments."""
    with recorded_engine(setup) as (engine, log):
        engine.set_gradient_accumulation_boundary(True)
        backward(engine, Micro(ALL, 1))
        log.clear()
        (accumulator,) = engine.optimizer.sums.accumulators
        param_id, place = next(iter(accumulator.group.owned.items()))
        piece = Piece(param_id, 0, place.offset, 0, place.numel, True)
        engine.optimizer.rollback.discard()
        for _ in range(2):
            accumulator.add(Run([piece], torch.ones(place.numel)), request_ends=True)
        return log[:]


def test_what_is_added_to_is_not_copied_meanwhile(one_rank: RankGroup) -> None:
    setup = Setup(offload=True, model="bf16", accum="fp32", retain=True)
    log = one_rank.run(two_parts_of_a_gradient, setup)[0]
    first = log.index("event on traffic")
    second = log.index("add on main", first)
    assert "wait on main for event on traffic" in log[first:second]


def test_without_pinned_memory_nothing_is_copied_before_the_end(one_rank: RankGroup) -> None:
    setup = Setup(offload=True, model="bf16", accum="fp32", zero=SMALL)
    first = one_rank.run(first_without_pinned_memory, setup)[0]
    *added, copied = order(first, "publish", "add")
    assert added == ["add"] * len(added)
    assert (len(added) > 2, copied) == (True, "publish")


def first_without_pinned_memory(setup: Setup) -> list[str]:
    from deepspeed.accelerator import get_accelerator

    with recorded_engine(setup) as (engine, log), patch.object(type(get_accelerator()), "is_pinned", lambda *_: False):
        backward(engine, Micro(ALL, 1))
        return log[:]


def without_pinned_memory(setup: Setup) -> list[str]:
    from deepspeed.accelerator import get_accelerator

    with recorded_engine(setup) as (engine, log), patch.object(type(get_accelerator()), "is_pinned", lambda *_: False):
        backward(engine, Micro(ALL, 1))
        log.clear()
        backward(engine, Micro(ALL, 2))
        return log[:]


def test_without_pinned_memory_the_first_bucket_restores(one_rank: RankGroup) -> None:
    """A copy from there would hold up the host, and is staged before a stream could wait."""
    setup = Setup(offload=True, model="bf16", accum="fp32")
    second = one_rank.run(without_pinned_memory, setup)[0]
    assert second.index("host waits") < second.index("restore on main") < second.index("add on main")
    assert "restore on traffic" not in second


def after_a_forward(setup: Setup, then: str) -> list[str]:
    """A request, the forward of another one whose backward does not come, and what is done ``then``."""
    from deepspeed.utils import safe_get_full_grad

    with recorded_engine(setup) as (engine, log):
        backward(engine, Micro(ALL, 1))
        log.clear()
        dtype = next(engine.module.parameters()).dtype
        loss = engine(torch.ones(4, dtype=dtype), torch.ones(6, dtype=dtype), ALL)
        assert log[-1] == "event on traffic"
        log.clear()
        if then == "load":
            engine.optimizer.load_state_dict([engine.optimizer.state_dict()])
        elif then == "read":
            safe_get_full_grad(next(engine.module.parameters()))
        elif then == "end":
            # Both groups are back; this backward, of a request of its own, reaches only one of them.
            del loss
            backward(engine, Micro((True, False, True, False, True), 2))
        else:
            getattr(engine, then)()
        return log[:]


@pytest.mark.parametrize("then", ["zero_grad", "step", "load", "end", "offload_states", "read"])
def test_a_copy_under_way_is_waited_for(one_rank: RankGroup, then: str) -> None:
    """Before its memory is used anew, moved or read."""
    setup = Setup(offload=True, model="bf16", accum="fp32", groups=2)
    log = one_rank.run(after_a_forward, setup, then)[0]
    waits = log.index("wait on main for event on traffic")
    if then in ("zero_grad", "step", "load", "end"):
        assert waits < log.index("free on main")


@pytest.mark.parametrize("stage", [1, 2])
@every_sum
def test_the_host_waits_once_per_backward(one_rank: RankGroup, stage: int, model: str, accum: str) -> None:
    setup = Setup(stage=stage, offload=True, model=model, accum=accum, at=AT_REQUEST_ENDS[stage])
    parts = one_rank.run(recorded, setup, [True, True, True])[0]
    assert [part.count("host waits") for part in parts] == [0, 1, 1, 1]
    for part in parts[:-1]:
        assert len(order(part, "event")) >= len(order(part, "publish")) > 0


def bucket_of_two_streams() -> list[str]:
    from requestzero.zero.stage_1_and_2.bucket import Bucket

    recorder = Recorder([])
    bucket = Bucket(torch.float32, torch.float32, capacity=8, buffers=1, total=8)
    with recorder.accelerator():
        bucket.add(0, 0, torch.ones(4))
        with recorder.current(Stream(recorder, "side")):
            bucket.add(1, 0, torch.ones(4))
        bucket.contents(recorder.stream)
    return recorder.log


def test_a_bucket_is_filled_behind_its_allocation(one_rank: RankGroup) -> None:
    """Its memory may still be in use by what is queued on the stream that it was allocated on."""
    log = [entry for entry in one_rank.run(bucket_of_two_streams)[0] if entry.startswith("wait")]
    assert log == ["wait on side for event on main", "wait on main for side"]


def discarded(setup: Setup, interrupted: bool) -> list[str]:
    """Log of ``zero_grad()`` after a backward that an exception may have ended."""
    from deepspeed.accelerator import get_accelerator

    with recorded_engine(setup) as (engine, log):
        if interrupted:
            interrupt_backward(engine)
        else:
            backward(engine, Micro(ALL, 1))
        log.clear()
        with patch.object(type(get_accelerator()), "synchronize", lambda *_: log.append("device waits")):
            engine.zero_grad()
        return log[:]


@pytest.mark.parametrize("bucket", [1, 1_000])
def test_what_an_exception_has_left_under_way_is_waited_for(one_rank: RankGroup, bucket: int) -> None:
    """Also where every bucket is empty: a reduction may still add to a sum whose memory is free from here on."""
    zero = {"overlap_comm": True, "reduce_bucket_size": bucket}
    setup = Setup(offload=True, model="bf16", accum="fp32", zero=zero)
    assert "device waits" in one_rank.run(discarded, setup, True)[0]
    assert "device waits" not in one_rank.run(discarded, setup, False)[0]


@every_sum
def test_a_discarded_copy_does_not_land_in_the_next_window(one_rank: RankGroup, model: str, accum: str) -> None:
    setup = Setup(offload=True, model=model, accum=accum)
    assert one_rank.run(discarded, setup, False)[0].count("host waits") == 1


def test_stock_waits_for_every_parameter(one_rank: RankGroup) -> None:
    """The recording can see the difference: DeepSpeed's own optimizer waits once per parameter."""
    setup = Setup(stage=2, offload=True, model="bf16", accum="bf16")
    parts = one_rank.run(recorded, setup, [False, False, True], False)[0]
    assert [part.count("host waits") for part in parts[1:3]] == [len(ALL), len(ALL)]


def test_a_gather_is_made_up_for_on_its_stream() -> None:
    """Its buffer belongs to the stream on which DeepSpeed gathers, not to that on which a request is aborted."""
    from requestzero.rank_check.interface import Agreement
    from requestzero.zero.stage_3.gather import Gather
    from requestzero.zero.stage_3.postponed_gathers import PostponedGathers

    recorder, gathers, streams = Recorder([]), PostponedGathers(Agreement()), []

    def run() -> None:
        streams.append(str(recorder.stream))
        if len(streams) == 1:
            raise torch.OutOfMemoryError("no memory")

    with recorder.accelerator():
        with recorder.current("gathers"), patch.object(gathers, "can_postpone", lambda: True):
            gathers.begin(Gather(run, [], None))
        with gathers.making_up():
            assert str(recorder.stream) == "main"
    assert streams == ["gathers", "gathers"]
