"""The demo's training with requestzero, stock DeepSpeed, Lightning's DDP and FSDP2: speed, memory, agreement.

    python benchmarks/end_to_end.py
    python benchmarks/end_to_end.py --windows 20 --only bf16
    python benchmarks/end_to_end.py --documentation outputs/end_to_end.md    # the tables of the docs

Starts two ranks. All contenders train the demo's model on the demo's requests with PyTorch's AdamW, without clipping,
and divide the sum over a window's trained tokens by their number. Two parts: ``fp32``, everything on the device; and
``bf16``, a bf16 model with fp32 masters and fp32 accumulation, the optimizer on the CPU where a contender can do that.

- Speed: every contender has a training of its own in the same two processes, and they run each window in turn. Shown
  are the times of DDP, and of stock at the same stage, divided by the contender's (all compute the same tokens, so that
  they are ratios of tokens per second): median and quartiles of all windows but the first. Stock runs with
  ``managed_gradient_accumulation: false``, its own way to many backwards and one step.
- Memory of a rank, in a pass before in which the contender is alone and nothing is timed: on GPUs what PyTorch has
  allocated, on the CPU the bytes of all live tensors, the host's included. "Between" is the most that is left after a
  micro-batch that ends a request. DeepSpeed's reduction bucket, which it allocates whole, has the model's size.
- Agreement: the largest difference of a final master weight from plain PyTorch on one process, in fp32 and in fp64, and
  whether all weights are those of the first contender bit for bit.

"Window" is ``reduce_gradients_at="window"``, which is the default of stage 1. FSDP2 "once" turns its reduction off
until the window's last backward. At stage 3 every weight is partitioned, and gathered when it is needed.

What is not the same: DDP keeps the whole model, its gradients and its optimizer state on every rank and reduces once,
in the window's last backward. FSDP2 shards the parameters too, as ZeRO-3 does, and reduces in every backward, as ZeRO-2
does, unless "once". In ``bf16`` DDP computes with autocast, which leaves some operators in fp32, and has
no offload; FSDP2 reduces in fp32 where ZeRO-2 reduces in bf16, and offloads parameters too, on GPUs only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from contenders import FSDP2, Contender, LightningDDP, Plain, StockZeRO, Weights, ZeRO, device
from markdown_tables import markdown_table, write_sections
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from two_ranks import start

from requestzero import MicroBatch
from requestzero.probe.timing import ratios, spread
from requestzero.recipes.model import next_token_loss

MEMORY_WINDOWS = 2
DDP = {"fp32": "Lightning DDP", "bf16": "Lightning DDP, autocast"}
PARTS: dict[str, dict[str, Callable[..., Contender]]] = {
    "fp32": {
        "requestzero ZeRO-2, window": partial(ZeRO, stage=2, at="window"),
        "requestzero ZeRO-2": partial(ZeRO, stage=2),
        "requestzero ZeRO-1": partial(ZeRO, stage=1),
        "requestzero ZeRO-3": partial(ZeRO, stage=3),
        "stock ZeRO-2": partial(StockZeRO, stage=2),
        "stock ZeRO-1": partial(StockZeRO, stage=1),
        "stock ZeRO-3": partial(StockZeRO, stage=3),
        DDP["fp32"]: partial(LightningDDP, bf16=False),
        "FSDP2": partial(FSDP2, bf16=False),
        "FSDP2, once": partial(FSDP2, bf16=False, once=True),
    },
    "bf16": {
        "requestzero ZeRO-2, window": partial(ZeRO, stage=2, at="window", bf16=True, offload=True),
        "requestzero ZeRO-2, released": partial(ZeRO, stage=2, bf16=True, offload=True),
        "requestzero ZeRO-2, retained": partial(ZeRO, stage=2, retain=True, bf16=True, offload=True),
        "requestzero ZeRO-1": partial(ZeRO, stage=1, bf16=True, offload=True),
        "requestzero ZeRO-3": partial(ZeRO, stage=3, bf16=True, offload=True),
        "stock ZeRO-2": partial(StockZeRO, stage=2, bf16=True, offload=True),
        "stock ZeRO-1": partial(StockZeRO, stage=1, bf16=True, offload=True),
        "stock ZeRO-3": partial(StockZeRO, stage=3, bf16=True, offload=True),
        DDP["bf16"]: partial(LightningDDP, bf16=True),
        "FSDP2": partial(FSDP2, bf16=True),
        "FSDP2, once": partial(FSDP2, bf16=True, once=True),
    },
}


@dataclass
class Window:
    """One rank's part of an update window."""

    micro_batches: list[MicroBatch]
    tokens: float
    """Trained tokens over all ranks."""


@dataclass
class Result:
    """Measurements of a contender on one rank."""

    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    """Bytes."""
    between: int = 0
    """Bytes."""
    weights: Weights = field(default_factory=list)


class LiveTensors(TorchDispatchMode):
    """Bytes of all storages that operators have used and that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._note(tensor.untyped_storage())
        if self._at_most > self.peak:
            self.peak = max(self.peak, self.live())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        # A weak reference keeps the address from being used again. FSDP2 gives back by resizing, which is no operator.
        reference, size = self._seen.get(storage._cdata) or (StorageWeakRef(storage), 0)
        if size != storage.nbytes():
            self._seen[storage._cdata] = reference, storage.nbytes()
            self._at_most += storage.nbytes() - size

    def live(self) -> int:
        """Return the bytes that are alive now."""
        alive = {}
        for address, (reference, _) in self._seen.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                alive[address] = reference, storage.nbytes()
        self._seen, self._at_most = alive, sum(size for _, size in alive.values())
        return self._at_most


def demo_config(overrides: list[str]) -> Any:
    """Return the configuration of ``make demo``."""
    from hydra import compose, initialize_config_module

    from requestzero.recipes.config_schema import register_schema

    register_schema()
    with initialize_config_module("requestzero.configs", version_base="1.3"):
        return compose("lightning_sft", overrides=overrides)


def demo_windows(cfg: Any, count: int) -> list[Window]:
    """Return this rank's part of the demo's first windows (collective)."""
    from requestzero.recipes.build import build_data, build_loader, build_tokenizer

    tokenizer = build_tokenizer(cfg.model)
    windows: list[Window] = []
    pending: list[MicroBatch] = []
    for micro_batch in build_loader(cfg, build_data(cfg, tokenizer, dist.get_world_size()), tokenizer):
        pending.append(micro_batch)
        if micro_batch.window_end:
            windows.append(Window(pending, tokens=sum(gathered(sum(each.weight for each in pending)))))
            pending = []
        if len(windows) == count:
            break
    return windows


def demo_model(cfg: Any) -> torch.nn.Module:
    """Build the demo's model, with the same weights on every call and rank."""
    from requestzero.recipes.build import build_model

    torch.manual_seed(cfg.seed)
    return build_model(cfg)


def gathered(value: Any) -> list[Any]:
    """Return every rank's value (collective)."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def train_window(contender: Contender, window: Window, request_ended: Callable[[], None] = lambda: None) -> None:
    contender.begin_window(window.micro_batches)
    for micro_batch in window.micro_batches:
        inputs = {name: value.to(device()) for name, value in micro_batch.inputs.items()}
        with contender.forward_context(micro_batch):
            contender.backward(next_token_loss(contender.model, inputs)[0] * (dist.get_world_size() / window.tokens))
        if micro_batch.request_end:
            request_ended()
    contender.step()


def measure_memory(build: Callable[[], Contender], windows: list[Window], result: Result) -> None:
    """Measure the bytes at the peak and between requests on this rank (collective)."""
    cuda = torch.cuda.is_available()
    tensors = LiveTensors()

    def note() -> None:
        result.between = max(result.between, torch.cuda.memory_allocated() if cuda else tensors.live())

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with nullcontext() if cuda else tensors:
        contender = build()
        for window in windows:
            train_window(contender, window, note)
    result.peak = torch.cuda.max_memory_allocated() if cuda else tensors.peak
    contender.close()


def measure_time(contenders: dict[str, Contender], windows: list[Window], results: dict[str, Result]) -> None:
    """Measure the seconds of every window, contenders in turn, each window beginning with another (collective)."""
    names = list(contenders)
    for number, window in enumerate(windows):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            began = time.perf_counter()
            train_window(contenders[name], window)
            synchronize()
            results[name].seconds.append(time.perf_counter() - began)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_part(part: str, cfg: Any, windows: list[Window]) -> dict[str, Result]:
    """Run all measurements of this rank, by contender (collective)."""
    builds = {
        name: lambda contender=contender: contender(demo_model(cfg), cfg.optimizer.lr)
        for name, contender in PARTS[part].items()
    }
    results = {name: Result() for name in builds}
    for name, build in builds.items():
        measure_memory(build, windows[:MEMORY_WINDOWS], results[name])
    contenders = {name: build() for name, build in builds.items()}
    measure_time(contenders, windows, results)
    for name, contender in contenders.items():
        results[name].weights = contender.weights()
        contender.close()
    return results


def plain_weights(cfg: Any, windows: list[Window]) -> list[Weights]:
    """Train plain PyTorch on one process, in fp32 on the first rank and in fp64 on the second; return the weights."""
    everywhere = gathered([window.micro_batches for window in windows])
    contender = Plain(demo_model(cfg), cfg.optimizer.lr, (torch.float32, torch.float64)[dist.get_rank()])
    for number, window in enumerate(windows):
        micro_batches = [each for rank in everywhere for each in rank[number]]
        train_window(contender, Window(micro_batches, window.tokens))
    return gathered(contender.weights())


def largest_difference(weights: Weights, others: Weights) -> float:
    pairs = zip(weights, others, strict=True)
    return max((mine.double() - other.double()).abs().max().item() for mine, other in pairs)


HEADINGS = ("", "against DDP", "against stock", "peak", "between", "from fp32", "from fp64", "same bits as the first")


def rows_of(part: str, by_rank: list[dict[str, Result]], plain: list[Weights]) -> list[list[str]]:
    """Return the cells of a part's table, a row for each contender."""
    first = next(iter(by_rank[0].values())).weights
    rows = []
    for name, result in by_rank[0].items():
        same = all(torch.equal(mine, other) for mine, other in zip(result.weights, first, strict=True))
        memory = (max(getattr(rank[name], kind) for rank in by_rank) for kind in ("peak", "between"))
        rows.append(
            [
                name,
                *(speed(name, other, by_rank) for other in (DDP[part], stock_of(name))),
                *(f"{size / 2**20:,.1f} MiB" for size in memory),
                *(f"{largest_difference(result.weights, each):.1e}" for each in plain),
                "yes" if same else "no",
            ]
        )
    return rows


def speed(name: str, other: str | None, by_rank: list[dict[str, Result]]) -> str:
    """Return how many times as fast as ``other`` a contender is: median and quartiles."""
    if name == other or other is None:
        return "" if other is None else "1"
    return str(spread([each for rank in by_rank for each in ratios(rank[other].seconds[1:], rank[name].seconds[1:])]))


def stock_of(name: str) -> str | None:
    """Return stock DeepSpeed at the stage of a contender, which may be that; ``None`` where there is none."""
    return next((f"stock ZeRO-{stage}" for stage in (1, 2, 3) if f"ZeRO-{stage}" in name), None)


def table_of(part: str, rows: list[list[str]]) -> Table:
    table = Table(title=f"{part}: tokens per second, bytes per rank, final weights")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def run_rank(parts: list[str], count: int, overrides: list[str], file: str | None) -> None:
    """Measure the parts; the first rank prints them, and writes them into ``file`` (collective)."""
    cfg = demo_config(overrides)
    windows = demo_windows(cfg, count)
    plain = plain_weights(cfg, windows)
    sections = []
    for part in parts:
        by_rank = gathered(measure_part(part, cfg, windows))
        if dist.get_rank() == 0:
            rows = rows_of(part, by_rank, plain)
            Console(width=170).print(table_of(part, rows))
            sections.append((part, markdown_table(HEADINGS, rows)))
    if sections and file is not None:
        write_sections(file, sections)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=8, help="update windows, at least 3 (default: %(default)s)")
    parser.add_argument("--only", choices=list(PARTS), help="one of the two parts")
    parser.add_argument("--documentation", metavar="FILE", help="also write the tables as Markdown")
    parser.add_argument("--quick", action="store_true", help="three windows")
    parser.add_argument("overrides", nargs="*", help="overrides of the demo, such as model=byte_decoder_tiny")
    given = parser.parse_args()
    count = 3 if given.quick else given.windows
    if count < 3:
        parser.error(f"--windows {count} is too few: the first one warms up, and ratios need two more.")
    start(run_rank, [given.only] if given.only else list(PARTS), count, given.overrides, given.documentation)


if __name__ == "__main__":
    main()
