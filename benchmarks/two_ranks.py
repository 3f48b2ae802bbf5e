"""Two data-parallel ranks for a benchmark: NCCL where there are as many GPUs, else gloo."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2


def start(function: Callable[..., None], *args: Any) -> None:
    """Call ``function(*args)`` on every rank, in processes of their own, and wait for them."""
    if torch.cuda.device_count() < RANKS:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run, (f"file://{folder}/store", function, args), nprocs=RANKS)


def _run(rank: int, rendezvous: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from requestzero.communication import without_inference_operator

    deepspeed.utils.logger.setLevel("ERROR")
    get_accelerator().set_device(rank)
    with without_inference_operator():
        deepspeed.init_distributed(
            get_accelerator().communication_backend_name(),
            auto_mpi_discovery=False,
            init_method=rendezvous,
            rank=rank,
            world_size=RANKS,
            verbose=False,
        )
    function(*args)
    dist.destroy_process_group()
