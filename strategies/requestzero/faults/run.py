"""All combinations, several at a time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from requestzero.faults.combination import Combination
from requestzero.faults.ranks import Limits
from requestzero.faults.references import References
from requestzero.faults.trial import Result, try_out


def run_all(
    combinations: Sequence[Combination],
    workers: int = 3,
    limits: Limits | None = None,
    report: Callable[[Result], None] = lambda result: None,
    keep: Path | None = None,
) -> list[Result]:
    """Run the combinations; return what became of them, in their order.

    Args:
        combinations: what to inject.
        workers: combinations at a time, of two processes each, which mostly wait.
        limits: of time.
        report: called with every result, when it is there.
        keep: a folder for the files of combinations in which something does not hold; by default they are removed.

    Raises:
        RuntimeError: a training fails without a fault.
    """
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="faults-") as name, ThreadPoolExecutor(workers) as pool:
        folder = Path(name)
        references = References(folder / "references", limits)

        def run(numbered: tuple[int, Combination]) -> Result:
            number, combination = numbered
            own = folder / str(number)
            result = try_out(combination, references, own, limits)
            if keep is not None and result.broken:
                shutil.copytree(own, keep / str(number))
            shutil.rmtree(own)
            report(result)
            return result

        return list(pool.map(run, enumerate(combinations)))
