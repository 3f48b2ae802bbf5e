"""Sections and columns of the tables, on the terminal and on the page, and the format of their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from requestzero.probe.options import COLUMNS
from requestzero.probe.result import Row


@dataclass(frozen=True)
class Column:
    """One column: its title, the name in ``--columns`` that chooses it, and a row's cell."""

    title: str
    chosen_by: str
    cell: Callable[[Row], str]
    meaning: str


@dataclass(frozen=True)
class Section:
    """One table."""

    title: str
    columns: tuple[Column, ...]

    def chosen(self, names: list[str]) -> list[Column]:
        return [column for column in self.columns if column.chosen_by in names]


def size(count: float) -> str:
    """Format a number of bytes, in units of 1024."""
    unit = min(int(math.log(count, 1024)), 3) if count >= 1 else 0
    digits = 0 if unit == 0 else 2
    return f"{count / 1024**unit:,.{digits}f} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def _precision(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _with_reference(name: str, text: Callable[[float], str]) -> Callable[[Row], str]:
    """Return ``reference (ratio)``, or nothing where there is no reference."""

    def cell(row: Row) -> str:
        reference = row.values.get(f"{name}_reference")
        if reference is None:
            return ""
        return f"{text(reference)} ({_times(row.values[f'{name}_to_reference'])})"

    return cell


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"x {ratio:.2f}"


def _value(name: str, text: Callable[[float], str] = _count) -> Callable[[Row], str]:
    return lambda row: text(row.values[name]) if name in row.values else ""


def _wrong(row: Row) -> str:
    return f"{row.values['wrong_updates']:,} of {row.values['updates']:,}" if "updates" in row.values else ""


def _moved(kind: str) -> Callable[[Row], str]:
    """Format the bytes to the host + from the host."""

    def cell(row: Row) -> str:
        if f"{kind}_to_host" not in row.values:
            return ""
        text = size if kind == "bytes" else _count
        return " + ".join(text(row.values[f"{kind}_{way}_host"]) for way in ("to", "from"))

    return cell


def _both_parts(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if f"{name}_backward" not in row.values:
            return ""
        return " + ".join(_count(row.values[f"{name}_{part}"]) for part in ("backward", "step"))

    return cell


def _time(part: str) -> Callable[[Row], str]:
    """Format the ratio to stock with its quartiles; on CUDA milliseconds too."""

    def cell(row: Row) -> str:
        seconds, ratio = row.values.get(f"{part}_seconds"), row.values.get(f"{part}_ratio")
        texts = [] if seconds is None else [f"{1000 * seconds:.2f} ms"]
        if ratio is not None:
            low, high = (row.values[f"{part}_ratio_{end}"] for end in ("low", "high"))
            texts.append(f"{ratio:.2f} ({low:.2f}-{high:.2f})")
        elif not row.engine.requestzero and "times" not in row.errors:
            texts.append("1")
        return "  ".join(texts)

    return cell


SECTIONS = (
    Section(
        "Exactness",
        (
            Column(
                "wrong updates",
                "updates",
                _wrong,
                "Parameter updates that differ in any bit from the exact sum of their window: random windows of uneven "
                "requests, with parameters that are absent, late or in part, and different data on every rank.",
            ),
            Column(
                "error of 16",
                "precision",
                _value("precision", _precision),
                "Largest relative error of a window of 16 micro-batches against its exact sum, read before the step.",
            ),
            Column(
                "reference (ratio)",
                "precision",
                _with_reference("precision", _precision),
                "The same in DeepSpeed's pull request 9044; behind it measured / reference.",
            ),
        ),
    ),
    Section(
        "Memory of gradients on a rank",
        (
            Column(
                "between requests",
                "memory",
                _value("bytes_between_requests", size),
                "The most after a request's end. On the CPU the storages that hold gradients, on CUDA all that is "
                "allocated.",
            ),
            Column(
                "reference (ratio)",
                "memory",
                _with_reference("bytes_between_requests", size),
                "For eight layers of 4096 x 4096 on one GPU the figures of pull request 9044, else what arithmetic "
                "predicts: one partition, bytes of the accumulation dtype x parameters / ranks, or none. Behind it "
                "measured / reference.",
            ),
            Column(
                "at peak",
                "memory",
                _value("bytes_at_peak", size),
                "The most at any time of the window; reduction bucket, gradients in flight and activations included.",
            ),
        ),
    ),
    Section(
        "Work and traffic of a boundary backward",
        (
            Column(
                "host copies",
                "copies",
                _moved("copies"),
                "Of a request after another one: copies into host gradients + out of them, to go on from there.",
            ),
            Column("bytes", "copies", _moved("bytes"), "Of these copies."),
            Column(
                "host reads",
                "reads",
                _both_parts("host_reads"),
                "Values that the host waits for, in the backward + in the step.",
            ),
            Column(
                "reference (ratio)",
                "reads",
                _with_reference("host_reads_backward", _count),
                "Of the backward: 399 of 398 tensors on one GPU in the public figures, else one for each tensor of the "
                "rank. Behind it measured / reference.",
            ),
            Column(
                "operators",
                "operators",
                _both_parts("operators"),
                "That PyTorch dispatches, in the backward + in the step.",
            ),
        ),
    ),
    Section(
        "Times, divided by stock's",
        tuple(
            Column(title, "times", _time(part), f"{meaning} Median of neighbouring windows (quartiles).")
            for part, title, meaning in (
                ("backward", "backward", "A backward that ends no request."),
                ("boundary", "boundary backward", "A backward that ends a request."),
                ("step", "step", "The optimizer step."),
            )
        ),
    ),
)


def cell_of(column: Column, row: Row) -> str:
    """Return the text of a cell: the value, or the type of the error where there is none."""
    error = row.errors.get(COLUMNS[column.chosen_by])
    return error.split(":")[0] if error else column.cell(row)


def chosen_sections(names: list[str]) -> Iterator[tuple[Section, list[Column]]]:
    """Return the sections that have a column of ``names``, with these columns."""
    for section in SECTIONS:
        columns = section.chosen(names)
        if columns:
            yield section, columns


def engine_text(row: Row) -> str:
    return f"{row.engine} ({row.note})" if row.note else str(row.engine)


def notes(rows: list[Row]) -> list[str]:
    """Return the errors in full, each once."""
    texts = [
        f"{row.configuration}, {row.engine}, {name}: {error.splitlines()[0]}"
        for row in rows
        for name, error in row.errors.items()
    ]
    return list(dict.fromkeys(texts))
