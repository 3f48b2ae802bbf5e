"""What the ranks send each other for one update, by contender: collectives, bytes, and the time on a slow link.

    python benchmarks/communication.py                       # counts, and times without a limit
    python benchmarks/communication.py --rate 1gbit          # the same on a link of that rate (root, Linux)
    python benchmarks/communication.py --ranks 4 --only fp32

All contenders train the demo's model on windows of 4 requests of 4 micro-batches, with the same tokens in each.

- Counted: the bytes of the tensors that a rank hands to every collective in one window, in multiples of the model in
  the part's dtype; collectives of less than 1 KiB (norms, flags, agreements of ranks) are left out.
- On the wire: what follows for each of 2, 8 and 64 ranks, by arithmetic, in the same multiples. A rank sends
  2 (n - 1) / n of what is all-reduced, and (n - 1) / n of what is reduce-scattered, gathered or exchanged. That is what
  rings do, and what gloo's all-reduce, all-gather and all-to-all were measured to send; gloo's own reduce-scatter,
  which FSDP2 uses, sends as much as an all-reduce (see docs/concepts/communication.md).
- Speed: DDP's time divided by the contender's, which is a ratio of tokens per second. All contenders have a training of
  their own in the same processes and run each window in turn: median and quartiles of all windows but the first.

``--rate`` runs everything in a network namespace of its own, whose loopback device has this rate: the ranks share it,
so that it limits the sum of what all of them send.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from contenders import FSDP2, Contender, LightningDDP, StockZeRO, ZeRO
from end_to_end import Window, demo_config, demo_model, gathered, synchronize, train_window
from rich.console import Console
from rich.table import Table
from two_ranks import start

from requestzero import MicroBatch
from requestzero.probe.counters import Collectives
from requestzero.probe.timing import ratios, spread

REQUESTS, MICRO_BATCHES, ROWS, TOKENS = 4, 4, 2, 128
SMALLEST = 1024
DDP = "DDP, no_sync"
CLUSTERS = (2, 8, 64)
Builder = Callable[[torch.nn.Module, float], Contender]


def contenders(bf16: bool) -> dict[str, Builder]:
    """Return the contenders of a part by name."""
    kind = {"bf16": bf16}
    return {
        DDP: partial(LightningDDP, bf16=bf16),
        "requestzero ZeRO-1": partial(ZeRO, stage=1, **kind),
        "requestzero ZeRO-1, request": partial(ZeRO, stage=1, at="request", **kind),
        "stock ZeRO-1, managed": partial(StockZeRO, stage=1, managed=True, **kind),
        "stock ZeRO-1, unmanaged": partial(StockZeRO, stage=1, **kind),
        "requestzero ZeRO-2": partial(ZeRO, stage=2, **kind),
        "requestzero ZeRO-2, request": partial(ZeRO, stage=2, at="request", **kind),
        "requestzero ZeRO-2, window": partial(ZeRO, stage=2, at="window", **kind),
        "requestzero ZeRO-2, auto": partial(ZeRO, stage=2, at="auto", **kind),
        "stock ZeRO-2, managed": partial(StockZeRO, stage=2, managed=True, **kind),
        "stock ZeRO-2, unmanaged": partial(StockZeRO, stage=2, **kind),
        "FSDP2": partial(FSDP2, bf16=bf16),
        "FSDP2, once": partial(FSDP2, bf16=bf16, once=True),
    }


def windows(count: int, vocabulary: int) -> list[Window]:
    """Return windows of random tokens, other ones on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    made = []
    for _ in range(count):
        micro_batches = []
        for request in range(REQUESTS):
            for position in range(MICRO_BATCHES):
                tokens = torch.randint(vocabulary, (ROWS, TOKENS), generator=generator)
                last = position == MICRO_BATCHES - 1
                inputs = {"input_ids": tokens, "labels": tokens.clone()}
                ends = last and request == REQUESTS - 1
                micro_batches.append(MicroBatch(inputs, last, ends, request_id=request, micro_batches=MICRO_BATCHES))
        made.append(Window(micro_batches, REQUESTS * MICRO_BATCHES * ROWS * (TOKENS - 1.0) * dist.get_world_size()))
    return made


def count(contender: Contender, window: Window) -> Counter[str]:
    """Return the bytes that this rank hands to each collective in one window (collective)."""
    with Collectives(SMALLEST) as seen:
        train_window(contender, window)
    return seen.bytes


def sent(sizes: Counter[str], ranks: int) -> float:
    """Return the bytes that a rank sends on the wire."""
    return sum(size * (2 if name == "all-reduce" else 1) * (ranks - 1) / ranks for name, size in sizes.items())


def measure(part: str, cfg: Any, number: int) -> Table:
    """Count and time all contenders of a part (collective)."""
    builders = contenders(part == "bf16")
    model = demo_model(cfg)
    size = sum(each.numel() for each in model.parameters()) * (2 if part == "bf16" else 4)
    data = windows(number + 2, cfg.model.vocab_size if "vocab_size" in cfg.model else 256)
    trainings = {name: build(demo_model(cfg), cfg.optimizer.lr) for name, build in builders.items()}
    sizes: dict[str, Counter[str]] = {}
    for name, training in trainings.items():
        train_window(training, data[0])
        sizes[name] = count(training, data[1])
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    names = list(trainings)
    for turn, window in enumerate(data[2:]):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            began = time.perf_counter()
            train_window(trainings[name], window)
            synchronize()
            seconds[name].append(time.perf_counter() - began)
    for training in trainings.values():
        training.close()
    return table_of(part, size, sizes, gathered(seconds))


def table_of(part: str, size: int, sizes: dict[str, Counter[str]], by_rank: list[dict[str, list[float]]]) -> Table:
    table = Table(title=f"{part}, {dist.get_world_size()} ranks: models per window, and speed against DDP")
    for heading in ("", "handed to collectives", *(f"sent, n={n}" for n in CLUSTERS), "speed"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("", "handed to collectives") else "right")
    for name, bytes_of in sizes.items():
        handed = ", ".join(f"{each} {value / size:.2f}" for each, value in sorted(bytes_of.items()))
        wire = [f"{sent(bytes_of, n) / size:.2f}" for n in CLUSTERS]
        speeds = [each for rank in by_rank for each in ratios(rank[DDP], rank[name])]
        table.add_row(name, handed, *wire, str(spread(speeds)))
    return table


def run_rank(parts: list[str], number: int, overrides: list[str]) -> None:
    cfg = demo_config(overrides)
    for part in parts:
        table = measure(part, cfg, number)
        if dist.get_rank() == 0:
            Console(width=150).print(table)


def run_on_link(rate: str, arguments: list[str]) -> int:
    """Run this script without ``--rate`` in a network namespace whose loopback device has the rate."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise SystemExit("--rate needs root, and the commands ip and tc (iproute2).")
    name = f"communication-{os.getpid()}"
    inside = ["ip", "netns", "exec", name]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        limit = ["rate", rate, "burst", "256kb", "latency", "100ms"]
        subprocess.run([*inside, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *limit], check=True)
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.run([*inside, sys.executable, __file__, *arguments], env=environment, check=False).returncode
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=8, help="timed windows, at least 3 (default: %(default)s)")
    parser.add_argument("--only", choices=["fp32", "bf16"], help="one of the two parts")
    parser.add_argument("--rate", help="of the link that the ranks share, as tc writes it: 1gbit, 200mbit")
    parser.add_argument("overrides", nargs="*", help="overrides of the demo, such as model=byte_decoder_tiny")
    given = parser.parse_args()
    if given.windows < 3:
        parser.error(f"--windows {given.windows} is too few: the first one warms up, and ratios need two more.")
    if given.rate:
        shown = ["--ranks", str(given.ranks), "--windows", str(given.windows), *given.overrides]
        raise SystemExit(run_on_link(given.rate, [*shown, *(["--only", given.only] if given.only else [])]))
    parts = [given.only] if given.only else ["fp32", "bf16"]
    start(run_rank, parts, given.windows, given.overrides, ranks=given.ranks)


if __name__ == "__main__":
    main()
