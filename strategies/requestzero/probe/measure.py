"""All measurements of all configurations, on one rank among others."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from requestzero.probe.costs import count_costs
from requestzero.probe.grid import STOCK, Configuration, Engine
from requestzero.probe.memory import measure_memory
from requestzero.probe.options import Options
from requestzero.probe.precision import measure_precision
from requestzero.probe.reference import add_references
from requestzero.probe.result import Row, Value, most
from requestzero.probe.timing import PARTS, measure_times, ratios, spread
from requestzero.probe.updates import count_wrong_updates
from requestzero.probe.windows import random_windows


def measure_all(options: Options, report: Callable[[str], None]) -> list[Row]:
    """Measure the rows of ``options.configurations()``; return the same on every rank (collective).

    An engine that cannot run a measurement gets an error in its row; the others go on.

    Args:
        options: of the run.
        report: called with the name of the next measurement, ``options.steps()`` times.
    """
    rows = []
    for configuration in options.configurations():
        rows += _measure(configuration, options, report)
    shape = options.model.shape()
    for row in rows:
        row.values |= vars(shape)
        add_references(row, shape, options.ranks, options.device)
    return rows


def _measure(configuration: Configuration, options: Options, report: Callable[[str], None]) -> list[Row]:
    rows = [Row(configuration, engine, note=_note(configuration, engine)) for engine in configuration.engines()]
    for name in options.measurements():
        if name == "times":
            report(f"{configuration}: times")
            _times(rows, options)
            continue
        for row in rows:
            report(f"{configuration}, {row.engine}: {name}")
            _run(row, name, options)
    return rows


def _run(row: Row, name: str, options: Options) -> None:
    values, error = _together(lambda: _MEASUREMENTS[name](row.configuration, row.engine, options))
    row.values.update(values)
    if error:
        row.errors[name] = error


_MEASUREMENTS: dict[str, Callable[[Configuration, Engine, Options], dict[str, Any]]] = {
    "updates": lambda configuration, engine, options: count_wrong_updates(
        configuration, engine, random_windows(options.windows, options.requests, options.seed)
    ),
    "precision": lambda configuration, engine, options: measure_precision(configuration, engine),
    "memory": lambda configuration, engine, options: measure_memory(
        configuration, engine, options.model, options.requests
    ),
    "costs": lambda configuration, engine, options: count_costs(configuration, engine, options.model),
}


def _times(rows: list[Row], options: Options) -> None:
    """Time the engines that could run everything else, since one that fails would stop them all."""
    running = [row for row in rows if not row.errors]
    engines = [row.engine for row in running]
    configuration = rows[0].configuration

    def measure() -> dict[str, Any]:
        times = measure_times(configuration, engines, options.model, options.requests, options.timed_windows)
        return {f"{engine} {part}": times[engine][part] for engine in engines for part in PARTS}

    seconds, error = _together(measure)
    for row in rows:
        if error or row not in running:
            row.errors["times"] = error or next(iter(row.errors.values()))
            continue
        for part in PARTS:
            _add_time(row, part, seconds[f"{row.engine} {part}"], seconds.get(f"{STOCK} {part}"), options.device)


def _add_time(row: Row, part: str, own: list[float], stock: list[float] | None, device: str) -> None:
    """Add the ratio to stock where that runs, and on CUDA the seconds; those of a CPU say little about other CPUs."""
    if row.engine.requestzero and stock is not None:
        found = spread(ratios(own, stock))
        row.values |= {f"{part}_ratio": found.median, f"{part}_ratio_low": found.low, f"{part}_ratio_high": found.high}
    if device == "cuda":
        row.values[f"{part}_seconds"] = statistics.median(own)


def _note(configuration: Configuration, engine: Engine) -> str:
    """Note a configuration that DeepSpeed runs with another class, which holds a whole fp32 gradient on every rank."""
    wide = configuration.model == "bf16" and configuration.accumulation == "fp32"
    if engine == STOCK and configuration.stage == 1 and not configuration.offload and wide:
        return "BF16_Optimizer"
    return ""


def _together(call: Callable[[], dict[str, Any]]) -> tuple[dict[str, Value], str]:
    """Combine the values of all ranks, or return the error of the first rank that has one."""
    try:
        mine: tuple[dict[str, Any], str] = call(), ""
    except Exception as error:  # reported in the row: a configuration that stock cannot run is a finding
        mine = {}, f"{type(error).__name__}: {error}"
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    errors = [error for _, error in by_rank if error]
    if errors:
        return {}, errors[0]
    return {name: most([values[name] for values, _ in by_rank]) for name in mine[0]}, ""
