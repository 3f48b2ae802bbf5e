"""Seconds and memory of planning on one core, by number of ranks, as a table in Markdown.

``python benchmarks/planning.py [--requests N] [--sample N]``. The dataset has N synthetic requests whose lengths are
computed when they are asked for: 1 to 1,000 texts, mostly few, of 3 to 30,000 tokens, both log-normal. ``--sample`` of
them are planned, in the shuffled order of an epoch; the epoch is extrapolated from that.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import time
import tracemalloc
from dataclasses import dataclass

from requestzero.planning import Budget, Planner, PlanStatistics, WindowRule

WORLD_SIZES = (2, 16, 128, 1024)
TOKENS = 32_768
"""In a micro-batch at most, and in a window for each rank."""


def lengths_of(request: int) -> list[int]:
    """Return the tokens of the texts of a request: median 3 texts and 250 tokens, a tail of a thousand texts."""
    rng = random.Random(request)
    texts = min(1000, max(1, int(rng.lognormvariate(math.log(3), 1.3))))
    return [min(30_000, max(3, int(rng.lognormvariate(math.log(250), 1.2)))) for _ in range(texts)]


@dataclass
class Result:
    """Seconds and memory of planning ``sample`` requests."""

    requests: int
    seconds: float
    seconds_for_lengths: float
    peak_bytes: int
    statistics: PlanStatistics


def planner_of(requests: int, layout: str, world_size: int) -> Planner:
    return Planner(requests, lengths_of, Budget(TOKENS, layout=layout), WindowRule(tokens=TOKENS * world_size))


def measure(requests: int, sample: int, world_size: int, layout: str) -> Result:
    """Measure the time and, with tracemalloc, the peak memory; for this a tenth of the sample is planned again."""
    planner = planner_of(requests, layout, world_size)
    total, planned = PlanStatistics(), 0
    started = time.process_time()
    for window in planner.epoch(0, world_size):
        for _ in window.plan.micro_batches(world_size - 1):
            pass  # this rank's share
        total += window.statistics
        planned += len(window.plan.requests)
        if planned >= sample:
            break
    seconds = time.process_time() - started
    started = time.process_time()
    for request in range(planned):
        lengths_of(request)
    reading = time.process_time() - started
    return Result(planned, seconds - reading, reading, peak(planner, world_size, planned // 10), total)


def peak(planner: Planner, world_size: int, sample: int) -> int:
    tracemalloc.start()
    planned = 0
    for window in planner.epoch(0, world_size):
        planned += len(window.plan.requests)
        if planned >= sample:
            break
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--sample", type=int, default=20_000)
    options = parser.parse_args()
    print("| layout | ranks | s per 10,000 requests | peak memory | padding | fillers | imbalance | naive |")
    print("|---|---|---|---|---|---|---|---|")
    for layout in ("padded", "packed"):
        for world_size in WORLD_SIZES:
            result = measure(options.requests, options.sample, world_size, layout)
            ours, naive, tokens = result.statistics.planned, result.statistics.naive, result.statistics.tokens
            cells = [
                layout,
                f"{world_size:,}",
                f"{result.seconds / result.requests * 10_000:.2f}",
                f"{result.peak_bytes / 1e6:.1f} MB",
                f"{ours.padding(tokens):.1%}",
                f"{ours.fillers / ours.micro_batches:.1%}",
                f"{ours.imbalance:.1%}",
                f"padding {naive.padding(tokens):.1%}, imbalance {naive.imbalance:.1%}",
            ]
            print("| " + " | ".join(cells) + " |", flush=True)
    print(f"\nRSS at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB; lengths not counted.")


if __name__ == "__main__":
    main()
