"""Under CPU offload the copy of a bucket to the host begins when it is reduced, unless an older sum there is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from requestzero.probe.models import Chain
from support.engines import build
from support.poison import interrupt_backward
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import applied_by, assert_sums
from support.windows import ALL, Micro, backward

LAYERS, WIDTH = 16, 8
BUCKET = 4 * WIDTH * WIDTH  # four layers: a window is reduced in four buckets
PARTITION = 4 * LAYERS * WIDTH * WIDTH // 2  # bytes of a rank's part, in fp32
SMALL = {"reduce_bucket_size": BUCKET}


class Order(TorchDispatchMode):
    """Logs reductions and copies into the host gradients, and the bytes of the copies."""

    def __init__(self, host: list[torch.Tensor]) -> None:
        super().__init__()
        self.log: list[str] = []
        self.copied = 0
        self._host = {each.untyped_storage().data_ptr() for each in host}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name == "c10d.alltoall_base_":
            self.log.append("reduce")
        elif name == "aten.copy_" and args[0].untyped_storage().data_ptr() in self._host:
            self.log.append("copy")
            self.copied += args[0].nbytes
        return func(*args, **(kwargs or {}))


def host_gradients(engine: Any) -> list[torch.Tensor]:
    return [master.grad for master in engine.optimizer.single_partition_of_fp32_groups]


def order_of_last_backward(setup: Setup, requests: int, announced: bool = True) -> tuple[list[str], int, int]:
    """Log of a window's last backward and its step, bytes copied to the host in them, and copies back to the device.

    The second of two windows, of ``requests`` requests of two micro-batches.
    """
    engine: Any = build(setup, model=Chain(LAYERS, WIDTH))
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16, device=engine.device)
    for _ in range(2):
        before = engine.partition_traffic.restores
        for number in range(2 * requests):
            if number % 2 == 0:
                engine.begin_request(micro_batches=2, window_end=announced and number == 2 * requests - 2)
            engine.set_gradient_accumulation_boundary(number % 2 == 1)
            loss = engine(x)
            order = Order(host_gradients(engine))
            first = next(engine.module.parameters())
            handle = first.register_hook(lambda _, log=order.log: log.append("first layer"))
            with order:
                engine.backward(loss)
                order.log.append("backward ends")
            handle.remove()
        with order:
            engine.step()
    restores = engine.partition_traffic.restores - before
    engine.destroy()
    return order.log, order.copied, restores


def setup_of(stage: int, at: str | None, overlap: bool = False, **options: Any) -> Setup:
    zero = {**SMALL, "overlap_comm": overlap}
    return Setup(stage, offload=True, model="bf16", accum="fp32", at=at, zero=zero, **options)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("masters", ["fp32", "bf16"])
def test_a_bucket_is_copied_before_the_next_is_reduced(
    two_ranks: RankGroup, stage: int, requests: int, masters: str
) -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": masters == "bf16"}
    optimizer = "cpu_adam" if masters == "bf16" else "sgd"  # 16-bit masters are for that one
    setup = setup_of(stage, "window", optimizer=optimizer, config={"bf16": bf16})
    for log, copied, restores in two_ranks.run(order_of_last_backward, setup, requests):
        assert log == ["first layer", *["reduce", "copy"] * 4, "backward ends"]
        assert copied == PARTITION // (1 if masters == "fp32" else 2)
        assert restores == 0, "there is nothing on the host that the sum would begin with"


@pytest.mark.parametrize("stage", [1, 2])
def test_with_overlap_copies_begin_while_the_backward_runs(two_ranks: RankGroup, stage: int) -> None:
    """The first rank owns the first half of the layers, whose gradients come last."""
    first, second = two_ranks.run(order_of_last_backward, setup_of(stage, "window", overlap=True), 3)
    assert first[0] == ["reduce", "reduce", "reduce", "copy", "first layer", "reduce", "copy", "backward ends"]
    assert second[0] == ["reduce", "copy", "reduce", "copy", "reduce", "first layer", "reduce", "backward ends"]
    assert first[1:] == second[1:] == (PARTITION, 0)


@pytest.mark.parametrize("config", [{}, {"requestzero": {"abort": True}}], ids=["window", "abort"])
def test_what_a_step_reduces_is_copied_bucket_by_bucket(two_ranks: RankGroup, config: dict[str, Any]) -> None:
    setup = setup_of(1, None, config=config)
    for log, copied, _ in two_ranks.run(order_of_last_backward, setup, 2, announced=False):
        assert log == ["first layer", "backward ends", *["reduce", "copy"] * 4]
        assert copied == PARTITION


@pytest.mark.parametrize(("stage", "at"), [(1, "request"), (2, None)])
def test_a_sum_that_the_window_may_go_back_to_stays_until_the_requests_end(
    two_ranks: RankGroup, stage: int, at: str | None
) -> None:
    """From a window's second request on the host gradient is what an abort goes back to."""
    for requests in (1, 2):
        for log, copied, _ in two_ranks.run(order_of_last_backward, setup_of(stage, at), requests):
            copies_early = "copy" in log[: len(log) - 1 - log[::-1].index("reduce")]
            assert copies_early == (requests == 1)
            assert log.index("copy") < log.index("backward ends")
            assert copied == PARTITION


# --- the sums are the same ------------------------------------------------------------------------------------------

SOME = (True, False, True, False, True)
FEW = (False, True, False, False, False)
WINDOWS = [
    [Micro(ALL, 1, False), Micro(SOME, 2)],  # a parameter whose last gradient is of an earlier backward
    [Micro(FEW, 3)],  # absent ones, whose host gradient is of the window before
    [Micro(SOME, 4), Micro(FEW, 5, False), Micro(SOME, 6)],
]


def sums_are_exact(setup: Setup) -> bool:
    """Also after a request that was interrupted in its last backward, when a part of it was on the host."""
    engine: Any = build(setup)
    for window in WINDOWS:
        for number, micro in enumerate(window):
            engine.set_gradient_accumulation_boundary(micro.request_end, window_end=number == len(window) - 1)
            backward(engine, micro, mark=False)
        assert_sums(applied_by(engine), window)
    engine.set_gradient_accumulation_boundary(True, window_end=True)
    interrupt_backward(engine)
    engine.abort_request("interrupted")
    backward(engine, Micro(FEW, 7))
    assert_sums(applied_by(engine), [Micro(FEW, 7)])
    engine.destroy()
    return True


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("stage", "at"), [(1, None), (1, "request"), (2, None), (2, "window")])
@pytest.mark.parametrize("options", [{"groups": 3}, {"checkpointing": "reentrant", "retain": True}], ids=str)
def test_sums_are_exact(
    two_ranks: RankGroup, stage: int, at: str | None, overlap: bool, options: dict[str, Any]
) -> None:
    zero = {"reduce_bucket_size": 8, "overlap_comm": overlap}
    setup = Setup(stage, offload=True, model="bf16", accum="fp32", at=at, zero=zero, **options)
    assert two_ranks.run(sums_are_exact, setup) == [True, True]


class Three(torch.nn.Module):
    """Three weights: the second of two ranks has one, and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, gradient: float) -> torch.Tensor:
        return (self.weight * gradient).sum()


def norm_beside_padding() -> float:
    """The norm of a window of two requests, after something (noise of an optimizer, say) was put into the padding."""
    engine: Any = build(Setup(offload=True, model="bf16", accum="fp32"), model=Three())
    for window in range(2):
        for gradient in (1.0, 1.0):
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(gradient))
        engine.step()
        if window == 0:
            (host,), (group,) = host_gradients(engine), engine.optimizer.layout.groups
            owned = sum(place.numel for place in group.owned.values())
            assert engine.global_rank == 0 or owned < host.numel()
            host[owned:] = 1000.0
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    return norm


def test_padding_is_zero_in_every_window(two_ranks: RankGroup) -> None:
    assert two_ranks.run(norm_beside_padding) == [pytest.approx(12**0.5)] * 2  # three gradients of 2


def read_and_aborted(setup: Setup) -> bool:
    """A gradient is read in the middle of a request, and that is aborted: the window is the request before it."""
    from deepspeed.utils import safe_get_full_grad

    engine: Any = build(setup)
    backward(engine, Micro(ALL, 1))
    engine.begin_request(micro_batches=2)
    backward(engine, Micro(ALL, 2, False))
    read = [safe_get_full_grad(param) for param in engine.module.parameters()]
    assert all(each is not None for each in read)
    engine.abort_request("read")
    assert_sums(applied_by(engine), [Micro(ALL, 1)])
    engine.destroy()
    return True


@pytest.mark.parametrize("stage", [1, 2])
def test_what_was_read_can_be_aborted(two_ranks: RankGroup, stage: int) -> None:
    setup = Setup(stage, offload=True, model="bf16", accum="fp32", at="request")
    assert two_ranks.run(read_and_aborted, setup) == [True, True]
