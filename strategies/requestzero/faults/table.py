"""Results as text, and as tables of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from requestzero.faults.combination import Combination, Fault, Point
from requestzero.faults.trial import Result

_TRAININGS: tuple[tuple[str, Callable[[Combination], str]], ...] = (
    ("front end", lambda each: each.front_end.value),
    ("ZeRO", lambda each: f"stage {each.setup.stage}"),
    ("optimizer", lambda each: "on the CPU" if each.setup.offload else "on the device"),
    ("model", lambda each: each.setup.precision.value),
    ("checkpoints", lambda each: "after every request" if each.setup.saves_inside else "after every update"),
    ("requests", lambda each: "one of each window is aborted" if each.setup.aborts else "none is aborted"),
)


def line(result: Result) -> str:
    """Return one result as a line."""
    state = "BROKEN" if result.broken else "holds"
    broken = f" -- {'; '.join(result.broken)}" if result.broken else ""
    resumed = f"; resumes from {result.resumed}" if result.resumed else ""
    return f"{state:6} {result.seconds:5.1f} s  {result.combination}: {result.outcome}{resumed}{broken}"


def summary(results: Sequence[Result]) -> str:
    """Return the numbers of all results as a line."""
    broken = sum(1 for result in results if result.broken)
    return f"{len(results)} combinations: {len(results) - broken} hold, {broken} do not"


def write_table(path: Path, results: Sequence[Result], seed: int) -> None:
    """Write what was injected, and what happened, as Markdown."""
    text = [f"{summary(results)} (seed {seed}).", "", *_by_fault(results), "", *_by_training(results)]
    path.write_text("\n".join([*text, "", *_errors(results), "", *_reasons(results)]).rstrip() + "\n", encoding="utf-8")


def _by_fault(results: Sequence[Result]) -> Iterator[str]:
    """Yield a row for every point, a column for every fault, and in it how many trainings have ended in which way."""
    yield "| point | " + " | ".join(fault.value for fault in Fault) + " |"
    yield "|---|" + "---|" * len(Fault)
    for point in Point:
        cells = []
        for fault in Fault:
            ways = Counter(
                _way(each) for each in results if (each.combination.point, each.combination.fault) == (point, fault)
            )
            cells.append(", ".join(f"{way} {count}" for way, count in sorted(ways.items())) or "-")
        yield f"| {point.value} | " + " | ".join(cells) + " |"


def _way(result: Result) -> str:
    if result.broken:
        return "**does not hold**"
    return "resumed" if result.resumed else "goes on"


def _by_training(results: Sequence[Result]) -> Iterator[str]:
    yield "| in trainings with | | combinations | hold |"
    yield "|---|---|---|---|"
    for name, value_of in _TRAININGS:
        drawn = Counter(value_of(each.combination) for each in results)
        holds = Counter(value_of(each.combination) for each in results if not each.broken)
        for value, count in sorted(drawn.items()):
            yield f"| {name} | {value} | {count} | {holds[value]} |"


def _errors(results: Sequence[Result]) -> Iterator[str]:
    """Yield how often ranks without a fault have ended with which error."""
    errors = Counter(result.outcome.split(":")[0] for result in results if result.resumed)
    if errors:
        yield "Errors of the ranks without the fault: " + ", ".join(f"{name} {n}" for name, n in errors.items()) + "."


def _reasons(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for what did not hold, by kind."""
    named = [(str(result.combination).split(", rank")[0], result) for result in results if result.broken]
    for name, group in groupby(sorted(named, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
        found = [result for _, result in group]
        yield f"- {name}: {'; '.join(sorted({each for result in found for each in result.broken}))}."
