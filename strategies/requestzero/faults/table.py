"""Results as text, and as a table of the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from pathlib import Path

from requestzero.faults.combination import Fault, FrontEnd, Point
from requestzero.faults.trial import Result

Kind = tuple[Point, Fault, FrontEnd]


def line(result: Result) -> str:
    """Return one result as a line."""
    state = "holds" if not result.broken else "known" if result.known else "BROKEN"
    broken = f" -- {'; '.join(result.broken)}" if result.broken else ""
    resumed = f"; resumes from {result.resumed}" if result.resumed else ""
    return f"{state:6} {result.seconds:5.1f} s  {result.combination}: {result.outcome}{resumed}{broken}"


def summary(results: Sequence[Result]) -> str:
    """Return the numbers of all results as a line."""
    broken = [result for result in results if result.broken]
    known = sum(1 for result in broken if result.known)
    holds, unknown = len(results) - len(broken), len(broken) - known
    return f"{len(results)} combinations: {holds} hold, {known} are known not to hold, {unknown} are broken"


def write_table(path: Path, results: Sequence[Result], seed: int) -> None:
    """Write what was injected, and what happened, as Markdown."""
    text = [f"{summary(results)} (seed {seed}).", "", *_table(results), "", *_reasons(results)]
    path.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")


def _table(results: Sequence[Result]) -> Iterator[str]:
    yield "| point | fault | " + " | ".join(front_end.value for front_end in FrontEnd) + " |"
    yield "|---|---|" + "---|" * len(FrontEnd)
    by_kind: dict[Kind, list[Result]] = {}
    for result in results:
        each = result.combination
        by_kind.setdefault((each.point, each.fault, each.front_end), []).append(result)
    for point, fault in product(Point, Fault):
        cells = [_cell(by_kind.get((point, fault, front_end), [])) for front_end in FrontEnd]
        yield f"| {point.value} | {fault.value} | " + " | ".join(cells) + " |"


def _cell(results: Sequence[Result]) -> str:
    """Return what has happened in all runs of one kind: error and resumption, without their details."""
    return "; ".join(sorted(set(map(_short, results)))) or "not drawn"


def _short(result: Result) -> str:
    if result.broken:
        return "**does not hold**"
    if not result.resumed:
        return result.outcome
    return f"{result.outcome.split(':')[0]}, resumes"


def _reasons(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for what did not hold, by kind and reason."""
    named = [(str(result.combination).split(", rank")[0], result) for result in results if result.broken]
    for name, group in groupby(sorted(named, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
        found = [result for _, result in group]
        known = f" Known: {found[0].known}" if found[0].known else ""
        yield f"- {name}: {'; '.join(sorted({each for result in found for each in result.broken}))}.{known}"
