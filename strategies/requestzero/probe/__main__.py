"""The command line of the probe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from requestzero.probe.options import Options, parse

if TYPE_CHECKING:
    from rich.console import Console

    from requestzero.probe.result import Result

_PLAIN_WIDTH = 160


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the results; return 0, or 1 if a rank failed. Wrong options raise SystemExit with code 2."""
    options = parse(arguments)
    from rich.console import Console

    from requestzero.probe.ranks import RankFailure
    from requestzero.probe.run import run_probe
    from requestzero.probe.table import print_tables

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    options = _with_fast_matmuls(options, console)
    try:
        _compile_ahead(options)
        with _progress(console, options.steps()) as report:
            result = run_probe(options, report)
    except (RankFailure, RuntimeError) as failure:
        print(failure, file=sys.stderr)
        return 1
    print_tables(console, result)
    for path in _write(result, options):
        console.print(f"wrote {path}", markup=False, highlight=False)
    return 0


def _with_fast_matmuls(options: Options, console: Console) -> Options:
    """Measure how a 16-bit model is computed faster on this processor, and say so."""
    if options.device != "cpu" or (options.dtype == "fp32" and not options.full):
        return options
    import torch

    from requestzero.environment.matmul_speed import LAYER, measure_matmuls

    width = options.model.width
    speed = measure_matmuls(torch.bfloat16, (1, width, width) if options.model.path is None else LAYER)
    chosen = "fp32" if speed.prefers_fp32 else "the model's dtype"
    console.print(f"Matrix products of the model: in {chosen} ({speed}).", markup=False, highlight=False)
    return replace(options, model=replace(options.model, fp32_matmuls=speed.prefers_fp32))


def _compile_ahead(options: Options) -> None:
    """Compile DeepSpeed's CPU Adam, which the configurations with 16-bit masters need, before the ranks."""
    if any(configuration.masters != "fp32" for configuration in options.configurations()):
        from requestzero.environment.cpu_adam import compile_cpu_adam

        compile_cpu_adam()


def _write(result: Result, options: Options) -> list[Path]:
    from requestzero.probe.figure import write_figures
    from requestzero.probe.files import write_csv, write_json
    from requestzero.probe.page import write_page

    options.out.mkdir(parents=True, exist_ok=True)
    paths = [options.out / "probe.json", options.out / "probe.csv"]
    write_json(result, paths[0])
    write_csv(result, paths[1])
    paths += write_figures(result, options.out)
    if options.html:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        write_page(result, options.html)
        paths.append(options.html)
    return paths


@contextmanager
def _progress(console: Console, steps: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on a terminal, which vanishes at the end; elsewhere print a line for every tenth of the work."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    begun = -1  # the first report is of the imports

    def report(text: str) -> None:
        nonlocal begun
        begun += 1
        bar.update(task, completed=max(0, begun - 1), description=text)
        if not console.is_terminal and begun % max(1, steps // 10) == 0:
            console.print(f"{begun}/{steps}  {text}", markup=False, highlight=False)

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("start", total=steps)
        yield report


if __name__ == "__main__":
    sys.exit(main())
