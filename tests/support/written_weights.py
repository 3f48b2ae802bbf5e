"""Weights that a user writes between steps, at every stage; every function runs on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from support.engines import build, masters, module_weights
from support.setup import Setup
from support.windows import ALL, LR, Micro, backward, reference

Write = Callable[[torch.nn.Module], None]


def in_place(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.25, 0.25)


def one_element(module: torch.nn.Module) -> None:
    """The other elements keep the bits that only the masters have."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.view(-1)[0] = 3.0


def load_state_dict(module: torch.nn.Module) -> None:
    module.load_state_dict({name: torch.full_like(value, 0.75) for name, value in module.state_dict().items()})


def data_in_place(module: torch.nn.Module) -> None:
    for parameter in list(module.parameters())[1:]:
        parameter.data.mul_(0.5)


def data_replaced(module: torch.nn.Module) -> None:
    for parameter in list(module.parameters())[:2]:
        parameter.data = torch.full_like(parameter, -1.5)


def moved_and_back(module: torch.nn.Module) -> None:
    """To another dtype and back, as for an export: other memory, the same values."""
    dtype = next(module.parameters()).dtype
    module.double()
    module.to(dtype)


def nothing(module: torch.nn.Module) -> None:
    pass


COUNTED: list[Write] = [nothing, in_place, one_element, load_state_dict, data_replaced, moved_and_back]
EVERY: list[Write] = [*COUNTED, data_in_place]


def micro(seed: int) -> Micro:
    return Micro(ALL, seed)


def window(engine: Any, seed: int) -> list[torch.Tensor]:
    """Run one micro-batch and step; the gradient, from plain PyTorch."""
    import deepspeed.comm as dist

    backward(engine, micro(seed))
    engine.step()
    return [gradient.float() for gradient in reference([[micro(seed)]], dist.get_world_size())[0]]


def set_masters_beyond_bf16(engine: Any) -> None:
    from deepspeed.utils import safe_set_full_fp32_param

    for parameter in engine.module.parameters():
        values = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
        safe_set_full_fp32_param(parameter, 1 + values / 4096)


def wrong_after_writes(setup: Setup, writes: list[Write]) -> list[str]:
    """Write, then make an update, again and again; names of what was not updated from the written weights."""
    engine = build(setup)
    set_masters_beyond_bf16(engine)
    window(engine, 0)
    wrong = []
    for seed, write in enumerate(writes, 1):
        before, kept = module_weights(engine), masters(engine)
        write(engine.module)
        after = module_weights(engine)
        start = [torch.where(a == b, k, a) for a, b, k in zip(after, before, kept, strict=True)]
        gradients = window(engine, seed)
        expected = [s - LR * g for s, g in zip(start, gradients, strict=True)]
        dtype = next(engine.module.parameters()).dtype
        for got, want in (
            (masters(engine), expected),
            (module_weights(engine), [e.to(dtype).float() for e in expected]),
        ):
            if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
                wrong.append(write.__name__)
    engine.destroy()
    return wrong


def saved_and_loaded(setup: Setup, directory: str) -> bool:
    """Write, save, load into another engine: its masters are what was written."""
    engine = build(setup)
    window(engine, 0)
    data_in_place(engine.module)
    in_place(engine.module)
    written = module_weights(engine)
    engine.save_checkpoint(directory)
    engine.destroy()
    other = build(setup)
    other.load_checkpoint(directory)
    right = all(
        torch.equal(got, want)
        for got, want in zip([*masters(other), *module_weights(other)], [*written, *written], strict=True)
    )
    other.destroy()
    return right
