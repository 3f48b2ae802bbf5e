"""Costs of a boundary backward and a step, counted and timed against DeepSpeed's own optimizer.

    python benchmarks/boundary_costs.py --tensors 64 400
    python benchmarks/boundary_costs.py --tensors 400 --only "offload" --windows 200
    python benchmarks/boundary_costs.py --tensors 64 --only "ZeRO-3"
    python benchmarks/boundary_costs.py --windows 0                              # counts only
    python benchmarks/boundary_costs.py --documentation outputs/boundary_costs.md    # the table of the docs

Starts two gloo ranks. Each holds two engines of every configuration, one of requestzero and one of stock DeepSpeed, and
runs windows of one backward and one step in turn. Counted (rank 0): operators that PyTorch dispatches, host reads,
copies into the host gradient and their bytes, on the second window. Timed: stock's time divided by ours for every pair
of neighbouring windows, from both ranks; median and quartiles. CPU time is that of the process, so that other work on
the machine disturbs it less than the wall clock. The forward is not timed, nor the agreement of ranks beside it
(``agreement.py`` times that).

``--documentation`` measures fp32 and bf16 at stages 1 and 2, with the check on, and writes a file of Markdown; about
five minutes on two cores, less with ``--windows``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from typing import Any
from unittest.mock import patch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from markdown_tables import markdown_table, write_sections
from rich.console import Console
from rich.table import Table
from two_ranks import RANKS, start

from requestzero.probe.counters import Operators, host_memory
from requestzero.probe.engines import announce
from requestzero.probe.models import Chain
from requestzero.probe.timing import ratios, spread

DTYPES = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32")]
PARTS = ("backward", "step")
WHOSE = ("ours", "stock")
BOTH = "both"
COUNTED = ("operators", "host reads", "host copies", "host bytes")


@dataclass(frozen=True)
class Case:
    """One configuration."""

    stage: int
    offload: bool
    model: str
    accumulation: str
    check: bool
    tensors: int

    def __str__(self) -> str:
        place = "offload" if self.offload else "device"
        check = "" if self.check or self.model == "fp32" else ", check off"
        return f"ZeRO-{self.stage} {place}, {self.model}/{self.accumulation}{check}, {self.tensors} tensors"

    def deepspeed_config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.stage == 3:  # weights are gathered when they are needed, and stepped in eight sub-groups
            zero |= {"stage3_param_persistence_threshold": 0, "sub_group_size": self.tensors * 64 // 2 // 8}
        precision: dict[str, Any] = {
            "fp32": {},
            "bf16": {"bf16": {"enabled": True, "check_grad_overflow": self.check}},
            "fp16": {"fp16": {"enabled": True, "loss_scale": 16.0}},
        }[self.model]
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "data_types": {"grad_accum_dtype": self.accumulation},
            **precision,
        }


def all_cases(tensors: list[int]) -> list[Case]:
    """Return every combination; the check can be switched in bf16 only."""
    return [
        Case(stage, offload, model, accumulation, check, count)
        for count, stage, offload, (model, accumulation) in product(tensors, (1, 2, 3), (False, True), DTYPES)
        for check in ((True, False) if model == "bf16" else (True,))
    ]


@dataclass
class Result:
    """Counts by ``(part, "ours" or "stock")``; seconds per window by ``(part, whose, clock)``."""

    counts: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    seconds: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)

    def ratios(self, part: str, clock: str) -> list[float]:
        """Return stock's time divided by ours for every pair of neighbouring windows."""
        return ratios(self.times(part, "stock", clock), self.times(part, "ours", clock))

    def times(self, part: str, whose: str, clock: str) -> list[float]:
        """Return the seconds of every window; ``BOTH`` is backward and step together."""
        if part == BOTH:
            return [b + s for b, s in zip(*(self.times(each, whose, clock) for each in PARTS), strict=True)]
        return self.seconds.get((part, whose, clock), [])

    def count(self, part: str, whose: str, name: str) -> int:
        return sum(self.counts[each, whose][name] for each in (PARTS if part == BOTH else (part,)))


class Training:
    """One engine and its windows."""

    def __init__(self, case: Case, requestzero: bool, width: int) -> None:
        import deepspeed

        import requestzero as ours

        model = Chain(case.tensors, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        initialize = ours.initialize if requestzero else deepspeed.initialize
        self.engine = initialize(model=model, optimizer=optimizer, config=case.deepspeed_config())[0]
        self.x = torch.ones(1, width, dtype=next(model.parameters()).dtype, device=self.engine.device)

    def forward(self) -> torch.Tensor:
        announce(self.engine, 1, window_end=True)
        self.engine.set_gradient_accumulation_boundary(True)
        return self.engine(self.x)

    def counted_window(self) -> tuple[Counter[str], Counter[str]]:
        loss = self.forward()
        host = host_memory(self.engine)
        with Operators(host) as in_backward:
            self.engine.backward(loss)
        with Operators(host) as in_step:
            self.engine.step()
        return counts_of(in_backward), counts_of(in_step)

    def timed_window(self) -> dict[tuple[str, str], float]:
        loss = self.forward()
        times = {}
        for part, call in (("backward", lambda: self.engine.backward(loss)), ("step", self.engine.step)):
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            call()
            times[part, "cpu"], times[part, "wall"] = time.process_time() - cpu, time.perf_counter() - wall
        return times


def counts_of(operators: Operators) -> Counter[str]:
    copies, moved = operators.copies_into_destinations, operators.bytes_to_host
    return Counter(dict(zip(COUNTED, (operators.total, operators.host_reads, copies, moved), strict=True)))


def measure(case: Case, windows: int, width: int) -> Result:
    """Measure counts and times of one configuration on this rank (collective)."""
    result = Result()
    trainings = {whose: Training(case, whose == "ours", width) for whose in ("stock", "ours")}
    for whose, training in trainings.items():
        for _ in range(2):
            counts = training.counted_window()
        result.counts.update({(part, whose): count for part, count in zip(PARTS, counts, strict=True)})
    for window in range(windows):
        for whose in ("ours", "stock") if window % 2 else ("stock", "ours"):
            for (part, clock), seconds in trainings[whose].timed_window().items():
                result.seconds.setdefault((part, whose, clock), []).append(seconds)
    for training in trainings.values():
        training.engine.destroy()
    return result


def table_of(results: list[tuple[Case, list[Result]]]) -> Table:
    table = Table(title="ours / stock; times: stock divided by ours, median (quartiles)")
    for name in (
        "configuration",
        "part",
        "operators",
        "host reads",
        "host copies",
        "host bytes",
        "CPU time",
        "wall time",
    ):
        table.add_column(name, justify="left" if name in ("configuration", "part") else "right", no_wrap=True)
    for case, by_rank in results:
        for part in (*PARTS, BOTH):
            counts = ["{:,} / {:,}".format(*(by_rank[0].count(part, w, n) for w in ("ours", "stock"))) for n in COUNTED]
            times = [shown([r for rank in by_rank for r in rank.ratios(part, clock)]) for clock in ("cpu", "wall")]
            table.add_row(str(case) if part == PARTS[0] else "", part, *counts, *times)
    return table


DOCUMENTED_DTYPES = {("fp32", "fp32"): "fp32", ("bf16", "bf16"): "bf16", ("bf16", "fp32"): "bf16, fp32 sum"}
DOCUMENTED_PLACES = ((1, True), (2, True), (1, False), (2, False))


def documented_cases(tensors: list[int]) -> list[Case]:
    """Return the configurations that the documentation has, row by row."""
    return [
        Case(stage, offload, model, accumulation, True, count)
        for stage, offload in DOCUMENTED_PLACES
        for model, accumulation in DOCUMENTED_DTYPES
        for count in tensors
    ]


def documentation(results: list[tuple[Case, list[Result]]]) -> str:
    """Return the table of the documentation: counts at every size, host reads and times at the largest."""
    sizes = sorted({case.tensors for case, _ in results})
    headings = [f"operators of a {part}, {size} tensors" for part in PARTS for size in sizes]
    headings += [f"host reads, backward + step, {sizes[-1]} tensors"]
    headings += [f"time of a {part}, {sizes[-1]} tensors" for part in PARTS]
    rows: dict[str, list[list[Result]]] = {}
    for case, by_rank in results:
        place = "offload" if case.offload else "device"
        dtype = DOCUMENTED_DTYPES[case.model, case.accumulation]
        rows.setdefault(f"ZeRO-{case.stage} {place}, {dtype}", []).append(by_rank)
    return markdown_table(["", *headings], [[name, *_documented(found)] for name, found in rows.items()])


def _documented(by_size: list[list[Result]]) -> list[str]:
    """Return the cells of a row; results are those of growing sizes."""
    largest = by_size[-1]
    counts = [
        f"{ranks[0].count(part, 'ours', 'operators'):,} / {ranks[0].count(part, 'stock', 'operators'):,}"
        for part in PARTS
        for ranks in by_size
    ]
    reads = (" + ".join(str(largest[0].count(part, whose, "host reads")) for part in PARTS) for whose in WHOSE)
    times = [shown([ratio for rank in largest for ratio in rank.ratios(part, "cpu")]) for part in PARTS]
    return [*counts, " / ".join(reads), *times]


def shown(found: list[float]) -> str:
    return str(spread(found)) if len(found) > 1 else "-"


def fp16_on_cpu(stack: ExitStack) -> None:
    """Let DeepSpeed's CPU accelerator accept fp16, which PyTorch computes there."""
    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    stack.enter_context(patch.object(kind, "is_fp16_supported", lambda self: True))
    stack.enter_context(patch.object(kind, "supported_dtypes", lambda self: dtypes))


def run_rank(cases: list[Case], windows: int, width: int, file: str | None) -> None:
    """Measure the configurations; the first rank prints them, and writes them into ``file`` (collective)."""
    results = []
    with ExitStack() as stack:
        fp16_on_cpu(stack)
        for case in cases:
            by_rank: list[Any] = [None] * RANKS
            dist.all_gather_object(by_rank, measure(case, windows, width))
            results.append((case, by_rank))
    if dist.get_rank() == 0:
        Console(width=190).print(table_of(results))
        if file is not None:
            write_sections(file, [("A backward and a step", documentation(results))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[64, 400], help="parameter tensors of the model")
    parser.add_argument("--width", type=int, default=8, help="a tensor has width x width elements")
    parser.add_argument("--windows", type=int, default=60, help="timed windows of each engine (0: counts only)")
    parser.add_argument("--only", default="", help='part of a configuration\'s name, such as "ZeRO-2 offload, fp32"')
    parser.add_argument("--documentation", metavar="FILE", help="measure what the docs have, and write their table")
    parser.add_argument("--quick", action="store_true", help="three windows")
    args = parser.parse_args()
    every = documented_cases if args.documentation else all_cases
    cases = [case for case in every(sorted(args.tensors)) if args.only in str(case)]
    if not cases:
        parser.error(f"--only {args.only!r} names no configuration: {', '.join(map(str, every([64])))}")
    start(run_rank, cases, 3 if args.quick else args.windows, args.width, args.documentation)


if __name__ == "__main__":
    main()
