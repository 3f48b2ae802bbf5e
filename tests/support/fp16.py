"""fp16 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest.mock import patch

import torch


@contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """Let DeepSpeed's CPU accelerator accept fp16, which it refuses although PyTorch computes it."""
    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    with (
        patch.object(kind, "is_fp16_supported", lambda self: True),
        patch.object(kind, "supported_dtypes", lambda self: dtypes),
    ):
        yield


def fp16_where_needed(model: str) -> AbstractContextManager[None]:
    """``fp16_on_cpu()`` for a model in fp16; nothing for another."""
    return fp16_on_cpu() if model == "fp16" else nullcontext()
