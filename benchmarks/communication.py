"""What the ranks send each other for one update, by contender: collectives, bytes, and the time on a slow link.

    python benchmarks/communication.py                       # counts, and times without a limit
    python benchmarks/communication.py --rate 1gbit          # the same on a link of that rate (root, Linux)
    python benchmarks/communication.py --ranks 4 --only fp32
    python benchmarks/communication.py --documentation outputs/communication.md    # all tables of the docs

All contenders train the demo's model on windows of 4 requests of 4 micro-batches, with the same tokens in each.

- Counted: the bytes of the tensors that a rank hands to every collective in one window, in multiples of the model in
  the part's dtype; collectives of less than 1 KiB (norms, flags, agreements of ranks) are left out.
- On the wire: what follows for each of 2, 8 and 64 ranks, by arithmetic, in the same multiples. A rank sends
  2 (n - 1) / n of what is all-reduced, and (n - 1) / n of what is reduce-scattered, gathered or exchanged. That is what
  rings do, and what gloo's all-reduce, all-gather and all-to-all were measured to send; gloo's own reduce-scatter,
  which FSDP2 and stock ZeRO-3 use, sends as much as an all-reduce (see docs/concepts/communication.md). In its place
  requestzero's ZeRO-3 calls the all-reduce on the CPU, and the reduce-scatter on GPUs: it is counted as the latter.
- Speed: DDP's time divided by the contender's, which is a ratio of tokens per second. All contenders have a training of
  their own in the same processes and run each window in turn: median and quartiles of all windows but the first.

``--rate`` runs everything in a network namespace of its own, whose loopback device has this rate: the ranks share it,
so that it limits the sum of what all of them send.

``--documentation`` runs 2 and 4 ranks, both parts, without a limit and at 500 Mbit/s (without root: without a limit
only), and writes a file of Markdown; about a quarter of an hour on two quiet cores. What sends most is left out where
four ranks share the link. ``--quick`` is the same with three windows, to see whether everything runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import FSDP2, Contender, LightningDDP, StockZeRO, ZeRO
from end_to_end import Window, demo_config, demo_model, gathered, synchronize, train_window
from markdown_tables import markdown_table, write_sections
from rich.console import Console
from rich.table import Table
from two_ranks import start

from requestzero import MicroBatch
from requestzero.probe.counters import Collectives
from requestzero.probe.timing import ratios, spread

REQUESTS, MICRO_BATCHES, ROWS, TOKENS = 4, 4, 2, 128
SMALLEST = 1024
DDP = "DDP, no_sync"
PARTS = ["fp32", "bf16"]
CLUSTERS = (2, 8, 64)
LINK, LINK_NAME = "500mbit", "500 Mbit/s"
LIGHT = (
    DDP,
    "requestzero ZeRO-1",
    "stock ZeRO-1, unmanaged",
    "requestzero ZeRO-2, window",
    "requestzero ZeRO-2, auto",
    "stock ZeRO-2, unmanaged",
)
"""Contenders of ``--light``."""
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
        "requestzero ZeRO-3": partial(ZeRO, stage=3, **kind),
        "stock ZeRO-3, managed": partial(StockZeRO, stage=3, managed=True, **kind),
        "stock ZeRO-3, unmanaged": partial(StockZeRO, stage=3, **kind),
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


Measured = dict[str, dict[str, Any]]
"""By contender: ``models``, what is handed to each collective in multiples of the model; ``speeds`` against DDP."""


def measure(part: str, cfg: Any, number: int, names: Sequence[str] | None) -> Measured:
    """Count and time contenders of a part, all of them or those of these names (collective)."""
    builders = {name: build for name, build in contenders(part == "bf16").items() if names is None or name in names}
    model = demo_model(cfg)
    size = sum(each.numel() for each in model.parameters()) * (2 if part == "bf16" else 4)
    data = windows(number + 2, cfg.model.vocab_size if "vocab_size" in cfg.model else 256)
    trainings = {name: build(demo_model(cfg), cfg.optimizer.lr) for name, build in builders.items()}
    sizes: dict[str, Counter[str]] = {}
    for name, training in trainings.items():
        train_window(training, data[0])
        sizes[name] = as_on_gpus(name, count(training, data[1]))
    by_rank = gathered(time_windows(trainings, data[2:]))
    for training in trainings.values():
        training.close()
    return {
        name: {
            "models": {each: value / size for each, value in sorted(bytes_of.items())},
            "speeds": [each for rank in by_rank for each in ratios(rank[DDP], rank[name])],
        }
        for name, bytes_of in sizes.items()
    }


def as_on_gpus(name: str, sizes: Counter[str]) -> Counter[str]:
    """Count the all-reduces of our ZeRO-3, which stand for gloo's reduce-scatter, as what they are on GPUs."""
    if name == "requestzero ZeRO-3":
        sizes["reduce-scatter"] += sizes.pop("all-reduce", 0)
    return sizes


def time_windows(trainings: dict[str, Contender], data: list[Window]) -> dict[str, list[float]]:
    """Return this rank's seconds of every window but the first, contenders in turn (collective)."""
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    names = list(trainings)
    for turn, window in enumerate(data):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            began = time.perf_counter()
            train_window(trainings[name], window)
            synchronize()
            seconds[name].append(time.perf_counter() - began)
    return {name: each[1:] for name, each in seconds.items()}


def handed(models: dict[str, float]) -> str:
    """Return what is handed to collectives as one text; whole numbers without fractions."""
    names = {"all-to-all": "exchange"}
    return ", ".join(f"{names.get(name, name)} {value:.2f}".removesuffix(".00") for name, value in models.items())


def table_of(part: str, measured: Measured) -> Table:
    table = Table(title=f"{part}, {dist.get_world_size()} ranks: models per window, and speed against DDP")
    for heading in ("", "handed to collectives", *(f"sent, n={n}" for n in CLUSTERS), "speed"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("", "handed to collectives") else "right")
    for name, found in measured.items():
        wire = [f"{sent(Counter(found['models']), n):.2f}" for n in CLUSTERS]
        table.add_row(name, handed(found["models"]), *wire, str(spread(found["speeds"])))
    return table


def run_rank(
    parts: list[str], number: int, overrides: list[str], names: Sequence[str] | None, file: str | None
) -> None:
    """Measure the parts; the first rank prints them, and writes them into ``file`` (collective)."""
    cfg = demo_config(overrides)
    results = {part: measure(part, cfg, number, names) for part in parts}
    if dist.get_rank() > 0:
        return
    for part, measured in results.items():
        Console(width=150).print(table_of(part, measured))
    if file is not None:
        Path(file).write_text(json.dumps(results), encoding="utf-8")


# --- the tables of the documentation --------------------------------------------------------------------------------


def document(path: str, number: int, overrides: list[str]) -> None:
    """Measure everything that the documentation has, and write its tables into ``path``."""
    rates = [None, LINK] if can_limit() else [None]
    columns: dict[str, dict[str, Measured]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for rate in rates:
            for ranks in (2, 4):
                name = f"{ranks} ranks" if rate is None else f"{ranks} ranks on {LINK_NAME}"
                file = f"{folder}/{len(columns)}.json"
                light = ["--light"] if rate is not None and ranks > 2 else []
                began = time.monotonic()
                run_alone(rate, ["--ranks", str(ranks), "--windows", str(number), "--json", file, *light, *overrides])
                columns[name] = json.loads(Path(file).read_text(encoding="utf-8"))
                print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
                write_sections(path, [(part, documented(part, columns)) for part in PARTS])


def documented(part: str, columns: dict[str, dict[str, Measured]]) -> str:
    """Return the table of a part: what is counted, and a column of speeds for each run."""
    counted = columns["2 ranks"][part]
    rows = []
    for name, found in counted.items():
        wire = [f"{sent(Counter(found['models']), n):.2f}" for n in CLUSTERS]
        speeds = [shown(name, each[part]) for each in columns.values()]
        rows.append([name.removeprefix("requestzero "), handed(found["models"]), *wire, *speeds])
    sizes = [f"sent, {CLUSTERS[0]} ranks", *map(str, CLUSTERS[1:])]
    return markdown_table(["", "handed to collectives", *sizes, *columns], rows)


def shown(name: str, measured: Measured) -> str:
    """Return the speed of a contender; empty where it was left out."""
    if name == DDP:
        return "1"
    return str(spread(measured[name]["speeds"])) if name in measured else ""


def can_limit() -> bool:
    """Return whether this process may make a network namespace and limit its rate."""
    return os.geteuid() == 0 and bool(shutil.which("ip") and shutil.which("tc"))


def run_alone(rate: str | None, arguments: list[str]) -> None:
    """Run this script in a process of its own, on a link of the rate if there is one.

    Raises:
        SystemExit: it has failed.
    """
    if rate is not None:
        code = run_on_link(rate, arguments)
    else:
        code = subprocess.run([sys.executable, __file__, *arguments], check=False).returncode
    if code:
        raise SystemExit(code)


def run_on_link(rate: str, arguments: list[str]) -> int:
    """Run this script without ``--rate`` in a network namespace whose loopback device has the rate."""
    if not can_limit():
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
    parser.add_argument("--only", choices=PARTS, help="one of the two parts")
    parser.add_argument("--rate", help="of the link that the ranks share, as tc writes it: 1gbit, 200mbit")
    parser.add_argument("--light", action="store_true", help="only the contenders that send little")
    parser.add_argument("--json", metavar="FILE", help="also write what was measured")
    parser.add_argument("--documentation", metavar="FILE", help="write all tables of the docs")
    parser.add_argument("--quick", action="store_true", help="three windows")
    parser.add_argument("overrides", nargs="*", help="overrides of the demo, such as model=byte_decoder_tiny")
    given = parser.parse_args()
    number = 3 if given.quick else given.windows
    if number < 3:
        parser.error(f"--windows {number} is too few: the first one warms up, and ratios need two more.")
    if given.documentation:
        document(given.documentation, number, given.overrides)
        return
    if given.rate:
        options = ["--only", given.only] if given.only else []
        options += ["--json", given.json] if given.json else []
        options += ["--light"] if given.light else []
        raise SystemExit(
            run_on_link(given.rate, ["--ranks", str(given.ranks), "--windows", str(number), *options, *given.overrides])
        )
    parts, names = [given.only] if given.only else PARTS, LIGHT if given.light else None
    start(run_rank, parts, number, given.overrides, names, given.json, ranks=given.ranks)


if __name__ == "__main__":
    main()
