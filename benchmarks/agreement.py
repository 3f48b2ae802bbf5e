"""Cost of the check of ranks, beside the updates of the demo.

    python benchmarks/agreement.py
    python benchmarks/agreement.py --pairs 100

Starts two gloo ranks, each with two engines on the demo's model and settings (ZeRO-2 with CPU offload, bf16 with fp32
accumulation), one with agreement and one without, which run updates of four requests in turn. Printed: the time of one
comparison of intents, with nothing beside it; the seconds of an update; the time of all comparisons of an update, as a
share of it; and the median over neighbouring updates of the time with agreement divided by the time without, which
noise on the machine changes by more than the agreement does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from two_ranks import start

from requestzero.recipes.model import ByteDecoder, next_token_loss

REQUESTS, TOKENS, SEQUENCES, VOCABULARY = 4, 128, 4, 259


def build(agreement: bool) -> Any:
    import requestzero

    torch.manual_seed(0)
    model = ByteDecoder(VOCABULARY, width=128, layers=4, heads=4, longest=TOKENS)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "retain_gpu_grad_partition_until_step": True}
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "requestzero": {"rank_agreement": agreement},
    }
    return requestzero.initialize(model=model, config=config)[0]


def update(engine: Any) -> float:
    """Return the seconds of an update of four requests with one to four micro-batches, announced as in the demo."""
    dist.barrier()
    start = time.perf_counter()
    for request in range(REQUESTS):
        micro_batches = request + 1
        engine.begin_request(request, micro_batches=micro_batches, window_end=request == REQUESTS - 1)
        for position in range(micro_batches):
            ids = torch.randint(0, VOCABULARY, (SEQUENCES, TOKENS))
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
            engine.set_gradient_accumulation_boundary(position == micro_batches - 1)
            engine.backward(next_token_loss(engine, inputs)[0])
    engine.step(divisor=engine.update_window.micro_batches)
    return time.perf_counter() - start


def one_agreement(engine: Any, times: int) -> float:
    """Return the median of the seconds that one comparison takes."""
    agreement, measured = engine.agreement, []
    for number in range(times):
        start = time.perf_counter()
        agreement.begin_request(number, 4, False)
        agreement._comparison.finish()
        measured.append(time.perf_counter() - start)
    return statistics.median(measured)


def measure(pairs: int) -> None:
    engines = build(True), build(False)
    for engine in engines:
        update(engine)
    before = engines[0].agreement._channel.rounds
    timed = [tuple(update(engine) for engine in engines) for _ in range(pairs)]
    rounds = (engines[0].agreement._channel.rounds - before) / pairs
    agreement = one_agreement(engines[0], 200)
    if dist.get_rank() == 0:
        seconds = statistics.median(without for _, without in timed)
        ratio = statistics.median(with_it / without for with_it, without in timed)
        print(f"one agreement               {agreement * 1e6:8.0f} us")
        print(f"an update of {REQUESTS} requests    {seconds * 1e3:8.1f} ms, {rounds:g} agreements")
        print(f"share of agreements         {rounds * agreement / seconds:8.2%}")
        print(f"with / without, median      {ratio:8.3f}")
    for engine in engines:
        engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=30, help="updates with and without agreement")
    pairs = parser.parse_args().pairs
    start(measure, pairs)


if __name__ == "__main__":
    main()
