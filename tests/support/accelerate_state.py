"""Accelerate's state, which belongs to a process, between tests that share one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import patch_environment

from requestzero.accelerate import patch


@contextmanager
def fresh(**environment: str) -> Iterator[None]:
    """Accelerate as in a process of its own, with these environment variables."""
    reset()
    alone = {"master_addr": "127.0.0.1", "local_world_size": os.environ.get("WORLD_SIZE", "1")}
    with patch_environment(**{**alone, **environment}):
        try:
            yield
        finally:
            reset()


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


@contextmanager
def unpatched() -> Iterator[None]:
    """Accelerate as in a program that has built none of our plugins yet."""
    saved, needed = Accelerator.__init__, patch._needed
    Accelerator.__init__ = getattr(saved, "__wrapped__", saved)
    try:
        yield
    finally:
        Accelerator.__init__, patch._needed = saved, needed


def is_patched() -> bool:
    return hasattr(Accelerator.__init__, "__wrapped__")
