"""The order of copies, events and waits on a device with streams, recorded on the CPU with a stand-in accelerator.

No arithmetic depends on it here; what is checked is that every copy that runs behind the host's back is followed by an
event, and that whatever would collide with the copy waits for that event first.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import RankGroup
from torch.utils._python_dispatch import TorchDispatchMode
from windows import Micro, Setup, backward, build

ALL = (True,) * 5


class Recorder(TorchDispatchMode):
    """Logs copies into and out of the host gradients, and what the stand-ins for stream and event are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.host: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func.overloadpacket) == "aten.copy_":
            into, source = (t.untyped_storage().data_ptr() in self.host for t in args[:2])
            if into or source:
                self.log.append("publish" if into else "restore")
        return func(*args, **(kwargs or {}))

    def accelerator(recorder) -> Any:
        class Stream:
            def wait_event(self, event: Any) -> None:
                recorder.log.append("stream waits")

            def wait_stream(self, stream: Any) -> None:
                pass

        class Event:
            def record(self, stream: Any) -> None:
                recorder.log.append("event")

            def synchronize(self) -> None:
                recorder.log.append("host waits")

        from deepspeed.accelerator import get_accelerator

        kind, stream = type(get_accelerator()), Stream()
        return (
            patch.object(kind, "resolves_data_dependency", lambda self: False),
            patch.object(kind, "Event", lambda self: Event()),
            patch.object(kind, "current_stream", lambda self, index=None: stream),
            patch.object(torch.Tensor, "record_stream", lambda tensor, stream: recorder.log.append("kept alive")),
        )


def recorded(setup: Setup, ends: list[bool], requestzero: bool = True) -> list[list[str]]:
    """Per backward, then for the step: what happened, without the reduction's own events."""
    engine = build(setup, requestzero)
    recorder = Recorder()
    recorder.host = {p.grad.untyped_storage().data_ptr() for p in engine.optimizer.single_partition_of_fp32_groups}
    parts = []
    patches = recorder.accelerator()
    for each in patches:
        each.start()
    try:
        # The buckets have producer and reuse events of their own.
        with patch.object(type(engine.optimizer), "_record_bucket_producer", lambda self, bucket: None), recorder:
            for seed, end in enumerate(ends):
                backward(engine, Micro(ALL, seed, end))
                parts.append(recorder.log[:])
                recorder.log.clear()
            engine.step()
            parts.append(recorder.log[:])
    finally:
        for each in patches:
            each.stop()
        engine.destroy()
    return parts


def order(log: list[str], *kinds: str) -> list[str]:
    return [entry for entry in log if entry in kinds]


@pytest.mark.parametrize("stage", [1, 2])
def test_release_and_restore_are_ordered(one_rank: RankGroup, stage: int) -> None:
    setup = Setup(stage=stage, offload=True, model="bf16", accum="fp32")
    first, second, step = one_rank.run(recorded, setup, [True, True])[0]
    # The freed partition stays allocated until its copy is done, and an event marks that copy.
    tail = order(first, "publish", "kept alive", "event")
    assert tail[tail.index("publish") :] == ["publish", "kept alive", "event"]
    # The host is not read before the copy into it is done; other streams do not add before the restore is.
    waits = order(second, "host waits", "restore", "event", "publish")
    assert waits[:2] == ["host waits", "restore"]
    assert waits.index("event") == 2
    assert waits.count("publish") == waits.count("restore") == 1
    assert order(step, "host waits") == ["host waits"], "the optimizer reads the host gradient after the last copy"


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("model", "accum"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")])
def test_the_host_waits_once_per_backward(one_rank: RankGroup, stage: int, model: str, accum: str) -> None:
    setup = Setup(stage=stage, offload=True, model=model, accum=accum)
    parts = one_rank.run(recorded, setup, [True, True, True])[0]
    assert [part.count("host waits") for part in parts] == [0, 1, 1, 1]
    for part in parts[:-1]:
        assert part.count("event") >= part.count("publish") > 0


def test_stock_waits_for_every_parameter(one_rank: RankGroup) -> None:
    """The recording can see the difference: DeepSpeed's own optimizer waits once per parameter."""
    setup = Setup(stage=2, offload=True, model="bf16", accum="bf16")
    parts = one_rank.run(recorded, setup, [False, False, True], False)[0]
    assert [part.count("host waits") for part in parts[1:3]] == [len(ALL), len(ALL)]
