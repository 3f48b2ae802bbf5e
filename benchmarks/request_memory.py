"""Memory over many short requests, with aborts, skipped updates and saves, counted and not timed.

    python benchmarks/request_memory.py
    python benchmarks/request_memory.py --requests 2000 --stage 1

Two gloo ranks train windows of ten requests, of which every third is aborted; every fourth window overflows and is
skipped, and a checkpoint is saved after each tenth of them. Printed there, for rank 0: live tensors, the bytes of their
storages, and the bytes that Python has allocated and not freed (tracemalloc). The names of applied requests that
``once=True`` compares with, of which an engine keeps 10,000, are 500 here: as many after the first tenth as at the end.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import tempfile
import tracemalloc
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from two_ranks import start

PER_WINDOW, ROUNDS = 10, 10


def build(stage: int, offload: bool) -> Any:
    import requestzero

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu" if offload else "none"}},
        "requestzero": {"abort": True},
    }
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
    return requestzero.initialize(model=model, config=config)[0]


def window(engine: Any, number: int) -> None:
    for request in range(PER_WINDOW):
        with engine.request(f"{number}.{request}", micro_batches=1, once=True):
            factor = float("nan") if request == 0 and number % 4 == 3 else 1.0
            inputs = torch.randn(2, 32, device=engine.device, dtype=torch.bfloat16)
            engine.backward(engine(inputs).square().mean() * factor)
            if request % 3 == 2:
                import requestzero

                raise requestzero.AbortRequest("every third")
    engine.step(divisor=engine.update_window.micro_batches)


def live() -> tuple[int, int, int]:
    """Return live tensors, the bytes of their storages, and the bytes that Python holds."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return len(tensors), sum(storages.values()), tracemalloc.get_traced_memory()[0]


def measure(requests: int, stage: int, offload: bool, folder: str) -> None:
    from requestzero.zero.engine import applied_requests

    applied_requests.KEPT = 500
    logging.getLogger("requestzero").setLevel(logging.ERROR)
    engine = build(stage, offload)
    tracemalloc.start()
    windows = requests // PER_WINDOW // ROUNDS
    for each in range(ROUNDS):
        for number in range(each * windows, (each + 1) * windows):
            window(engine, number)
        engine.save_checkpoint(folder, tag="same")
        tensors, storages, python = live()
        if dist.get_rank() == 0:
            print(
                f"{(each + 1) * windows * PER_WINDOW:6d} requests, {engine.aborted_requests} aborted, "
                f"{engine.skipped_updates} updates skipped: {tensors} tensors, {storages} bytes; Python {python} bytes",
                flush=True,
            )
    engine.destroy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--offload", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as checkpoints:
        start(measure, options.requests, options.stage, options.offload, checkpoints)
