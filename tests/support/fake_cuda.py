"""What the GPU part of the self-test calls of CUDA, on the CPU: memory is counted and streams do nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock, patch

import torch

TOTAL = 10**12


class FakeMemory:
    """Memory of a device: what is asked for by ``torch.empty`` is counted and not given."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, Any]] = []
        self._empty = torch.empty

    def empty(self, *size: Any, **options: Any) -> torch.Tensor:
        if options.pop("pin_memory", False) or options.get("device") == "cuda":
            found = self._empty(1, dtype=torch.uint8)
            self.taken.append((size[0], weakref.ref(found)))
            return found
        return self._empty(*size, **options)

    def free(self) -> int:
        return TOTAL - sum(size for size, tensor in self.taken if tensor() is not None)

    def info(self) -> tuple[int, int]:
        return self.free(), TOTAL

    def allocated(self) -> int:
        from requestzero.zero.stage_1_and_2.accumulators.offload_partition import PartitionAccumulator

        return sum(each.device_bytes for each in gc.get_objects() if isinstance(each, PartitionAccumulator))


@contextmanager
def fake_cuda(width: int) -> Iterator[None]:
    """While the block runs, the GPU part runs on the CPU, with layers of ``width``."""
    from deepspeed.accelerator import get_accelerator

    from requestzero.doctor.verify import gpu, slow_windows
    from requestzero.zero.stage_1_and_2.accumulators import retention

    memory = FakeMemory()
    changes: dict[str, Any] = {
        "Stream": MagicMock,
        "stream": nullcontext,
        "current_stream": MagicMock,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": memory.info,
        "memory_allocated": memory.allocated,
        "set_sync_debug_mode": lambda mode: None,
        "_sleep": lambda cycles: None,
    }
    with ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch, "empty", memory.empty))
        stack.enter_context(patch.object(torch, "empty_like", lambda like, **options: like.clone()))
        stack.enter_context(patch.object(slow_windows, "WIDTH", width))
        stack.enter_context(patch.object(gpu, "PARAMETERS", slow_windows.LAYERS * width**2))
        stack.enter_context(patch.object(retention, "free_device_memory", memory.free))
        stack.enter_context(patch.object(get_accelerator(), "total_memory", lambda: TOTAL))
        stack.enter_context(patch.object(get_accelerator(), "is_pinned", lambda tensor: True))
        yield
