"""Ranks on the CPU, for which Accelerate finds no backend under DeepSpeed: each would believe to be alone.

HACK: ``PartialState`` chooses the backend and has no default that a program could set from outside. Written for
Accelerate 1.15.
"""

from __future__ import annotations

import functools
import os
from typing import Any


def join_on_cpu(partial_state: Any) -> None:
    """Let ``PartialState`` join a launcher's ranks with gloo, under DeepSpeed on a machine without an accelerator."""
    original = partial_state.__init__

    @functools.wraps(original)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if cpu or not _needs_backend() or kwargs.get("backend") is not None:
            original(self, cpu=cpu, **kwargs)
            return
        from requestzero.zero.process_group import without_inference_operator

        with without_inference_operator():
            original(self, cpu=cpu, **{**kwargs, "backend": "gloo"})

    partial_state.__init__ = __init__


def _needs_backend() -> bool:
    import torch
    from accelerate.utils import parse_flag_from_env

    if "LOCAL_RANK" not in os.environ or not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        return False
    return torch.accelerator.current_accelerator(check_available=True) is None
