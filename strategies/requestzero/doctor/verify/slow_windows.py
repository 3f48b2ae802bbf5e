"""Windows whose backwards are slow on the device, and whose copies to and from the host are late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from requestzero.doctor.verify.setup import Setup
from requestzero.doctor.verify.training import build

LAYERS, WIDTH = 8, 1024
PARAMETERS = LAYERS * WIDTH**2
_SLEEP = 20_000_000  # cycles, about 10 ms: many times what a backward of a layer takes
_LATE = 6 * _SLEEP  # more than the backward of a bucket's layers takes, and than the host does
SETUP = Setup(stage=2, offload=True, model="bf16", accum="fp32")
STAGE_3 = replace(SETUP, stage=3)


class SlowChain(torch.nn.Module):
    """Layers that stay the identity, whose backwards wait before each layer.

    The gradient of each layer is then exact: the outer product of ones and the sum of the inputs. What a stream fails
    to wait for is seen, since the other streams are far ahead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
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


class LateCopies(TorchDispatchMode):
    """Lets copies between host and device begin late, on the stream that they are queued on.

    Who does not wait for a copy reads what was there before, or writes what the copy then replaces.
    """

    COPIES = (torch.ops.aten.copy_, torch.ops.aten._foreach_copy_, torch.ops.aten._to_copy)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in self.COPIES and _leaves_its_device(args, kwargs.get("device")):
            torch.cuda._sleep(_LATE)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def _leaves_its_device(args: Any, device: Any) -> bool:
    """Return whether a copy is one between devices, and of more than inputs."""
    tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
    devices = {each.device.type for each in tensors} | ({torch.device(device).type} if device is not None else set())
    return len(devices) > 1 and tensors[0].numel() > WIDTH


@contextmanager
def slow_engine(setup: Setup, **zero: Any) -> Iterator[Any]:
    """Build an engine with a learning rate of zero, so that the layers stay as they are. A bucket has two of them."""
    setup = replace(setup, zero={"reduce_bucket_size": 2 * WIDTH**2, **zero})
    engine = build(setup, model=SlowChain(), lr=0.0)
    try:
        yield engine
    finally:
        engine.destroy()


def slow_backward(engine: Any, seed: int, end: bool) -> torch.Tensor:
    """Run one micro-batch of small whole numbers; return the sum of its inputs over all ranks."""
    ranks = dist.get_world_size()
    inputs = [torch.randint(-2, 3, (1, WIDTH), generator=_generator(seed, rank)) for rank in range(ranks)]
    engine.set_gradient_accumulation_boundary(end)
    mine = inputs[dist.get_rank()] * ranks  # the mean over ranks is exact
    engine.backward(engine(mine.to(engine.device, torch.bfloat16)))
    return torch.stack(inputs).sum(0).double()


def _generator(seed: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1009 * seed + rank)


def slow_window(engine: Any, seed: int, copies: AbstractContextManager[Any] | None = None) -> bool:
    """Run a window of three requests of two micro-batches; return whether every sum is exact."""
    from deepspeed.utils import safe_get_full_grad

    expected = torch.zeros(1, WIDTH, dtype=torch.float64)
    with copies or nullcontext():
        for micro in range(6):
            expected += slow_backward(engine, 100 * seed + micro, end=micro % 2 == 1)
    sums = [safe_get_full_grad(param) for param in engine.module.parameters()]
    exact = all(torch.equal(each.double().cpu(), expected.expand(WIDTH, -1)) for each in sums if each is not None)
    engine.step()
    return exact and all(each is not None for each in sums)
