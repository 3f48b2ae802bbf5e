"""The command line: draw, inject, print, and write the table."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments say; return 0, or 1 if something did not hold."""
    options = _parse(arguments)
    from requestzero.faults.drawing import draw
    from requestzero.faults.ranks import Limits
    from requestzero.faults.run import run_all
    from requestzero.faults.table import line, summary, write_table

    seed = int(time.strftime("%Y%m%d")) if options.seed is None else options.seed
    print(f"{options.count} combinations, seed {seed}", flush=True)
    combinations = draw(options.count, seed)
    limits = Limits(end=options.limit, longest_wait=options.longest_wait)
    results = run_all(combinations, options.workers, limits, lambda each: print(line(each), flush=True), options.keep)
    print(summary(results))
    if options.table is not None:
        write_table(options.table, results, seed)
    return int(any(result.broken for result in results))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m requestzero.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="combinations (500)")
    parser.add_argument("--seed", type=int, help="of the drawing (today's date)")
    parser.add_argument("--workers", type=int, default=3, help="combinations at a time (3)")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds in which ranks have to end after one (40)")
    parser.add_argument("--longest-wait", type=float, default=15.0, help="timeout where a rank is stopped (15)")
    parser.add_argument("--table", type=Path, help="write what happened into this Markdown file")
    parser.add_argument("--keep", type=Path, help="keep the files of what did not hold in this folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
