"""Order between streams of an accelerator; nothing where the accelerator orders operations by itself (the CPU)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


def has_streams() -> bool:
    """Return whether operations on different streams have to be ordered by events."""
    return not get_accelerator().resolves_data_dependency()


def current_stream() -> Any:
    """Return the stream that operators are queued on now, ``None`` without streams."""
    return get_accelerator().current_stream() if has_streams() else None


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Return a block whose operators are queued on ``stream``, of :func:`current_stream`."""
    return nullcontext() if stream is None else get_accelerator().stream(stream)


def record_event() -> Any:
    """Record an event behind everything that is queued on the current stream; ``None`` without streams."""
    if not has_streams():
        return None
    event = get_accelerator().Event()
    event.record(get_accelerator().current_stream())
    return event


def keep_alive(tensor: torch.Tensor, stream: Any) -> None:
    """Do not reuse the memory of ``tensor`` before ``stream`` has done what is queued on it now."""
    if has_streams():
        tensor.record_stream(stream)
