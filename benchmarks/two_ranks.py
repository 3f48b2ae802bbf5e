"""Data-parallel ranks for a benchmark, two unless more are asked for: NCCL where there are as many GPUs, else gloo."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from requestzero.probe.ranks import process_group

RANKS = 2


def start(function: Callable[..., None], *args: Any, ranks: int = RANKS) -> None:
    """Call ``function(*args)`` on every rank, in processes of their own, and wait for them."""
    if torch.cuda.device_count() < ranks:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run, (folder, ranks, function, args), nprocs=ranks)


def _run(rank: int, folder: str, ranks: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    from deepspeed.accelerator import get_accelerator

    with process_group(rank, ranks, get_accelerator().device_name(), folder):
        function(*args)
