"""Cost of the check of ranks, beside the updates of the demo.

    python benchmarks/agreement.py
    python benchmarks/agreement.py --pairs 100 --stage 3
    python benchmarks/agreement.py --pairs 0                # counts only

Starts two gloo ranks, each with two engines on the demo's model and settings (ZeRO-2 with CPU offload, bf16 with fp32
accumulation), one with agreement and one without, which run updates of four requests in turn. Printed: the time of one
comparison of intents, with nothing beside it; the seconds of an update; the time of all comparisons of an update, as a
share of it; and the median over neighbouring updates of the time with agreement divided by the time without, which
noise on the machine changes by more than the agreement does.

Counted before, at stage 3: the comparisons of such an update, announced or not, and with four evaluations in it. There
each comes before the first gather of weights of a forward, or before the step.
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
from rich.console import Console
from rich.table import Table
from two_ranks import start

from requestzero.recipes.model import ByteDecoder, next_token_loss

REQUESTS, TOKENS, SEQUENCES, VOCABULARY = 4, 128, 4, 259


def build(agreement: bool, stage: int, width: int = 128, **zero: Any) -> Any:
    import requestzero

    torch.manual_seed(0)
    model = ByteDecoder(VOCABULARY, width=width, layers=4, heads=4, longest=TOKENS)
    zero |= {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if stage == 2:
        zero["retain_gpu_grad_partition_until_step"] = True
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


def batch(tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (SEQUENCES, tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def update(engine: Any, announced: bool = True, evaluations: int = 0, tokens: int = TOKENS) -> float:
    """Return the seconds of an update of four requests with one to four micro-batches, announced as in the demo.

    Args:
        engine: of the demo's model.
        announced: say beforehand how many micro-batches a request has, and which one is the last.
        evaluations: forwards without gradients before every request.
        tokens: of a text.
    """
    dist.barrier()
    start = time.perf_counter()
    for request in range(REQUESTS):
        with torch.no_grad():
            for _ in range(evaluations):
                next_token_loss(engine, batch(tokens))
        micro_batches = request + 1
        if announced:
            engine.begin_request(request, micro_batches=micro_batches, window_end=request == REQUESTS - 1)
        for position in range(micro_batches):
            engine.set_gradient_accumulation_boundary(position == micro_batches - 1)
            engine.backward(next_token_loss(engine, batch(tokens))[0])
    engine.step(divisor=engine.update_window.micro_batches)
    return time.perf_counter() - start


WAYS: dict[str, dict[str, Any]] = {
    "announced": {},
    "not announced": {"announced": False},
    "announced, an evaluation before each request": {"evaluations": 1},
}


def count() -> Table:
    """Count the comparisons of an update at stage 3, after a first one (collective)."""
    table = Table(title=f"agreements of an update of {REQUESTS} requests at stage 3")
    table.add_column("its forwards")
    table.add_column("agreements", justify="right")
    engine = build(True, stage=3, width=16, stage3_param_persistence_threshold=0)
    for way, options in WAYS.items():
        update(engine, tokens=8, **options)
        before = engine.agreement._channel.rounds
        update(engine, tokens=8, **options)
        table.add_row(way, str(engine.agreement._channel.rounds - before))
    engine.destroy()
    return table


def one_agreement(engine: Any, times: int) -> float:
    """Return the median of the seconds that one comparison takes."""
    agreement, measured = engine.agreement, []
    for number in range(times):
        start = time.perf_counter()
        agreement.begin_request(number, 4, False)
        agreement._comparison.finish()
        measured.append(time.perf_counter() - start)
    return statistics.median(measured)


def measure(pairs: int, stage: int) -> None:
    counts = count()
    if dist.get_rank() == 0:
        Console(width=120).print(counts)
    if pairs > 0:
        time_updates(pairs, stage)


def time_updates(pairs: int, stage: int) -> None:
    engines = build(True, stage), build(False, stage)
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
    parser.add_argument("--pairs", type=int, default=30, help="updates with and without agreement (0: counts only)")
    parser.add_argument("--stage", type=int, choices=(2, 3), default=2, help="of the timed updates")
    given = parser.parse_args()
    start(measure, given.pairs, given.stage)


if __name__ == "__main__":
    main()
