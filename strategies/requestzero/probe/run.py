"""One run of the probe: its measurements on its ranks."""

from __future__ import annotations

from functools import partial

from requestzero.probe.options import Options
from requestzero.probe.ranks import Launch, Report, run_ranks
from requestzero.probe.result import Result


def run_probe(options: Options, report: Report) -> Result:
    """Run all measurements in ``options.ranks`` processes of this machine.

    Args:
        options: of the run.
        report: called in this process with the name of the next measurement.

    Raises:
        RankFailure: a rank raised or died.
    """
    result: Result = run_ranks(Launch(partial(measure, options), options.ranks, options.device), report)
    return result


def measure(options: Options, report: Report) -> Result:
    """Measure everything on this rank; the result is the same on every rank (collective)."""
    from requestzero.environment.machine import describe_machine
    from requestzero.probe.measure import measure_all

    rows = measure_all(options, report)
    return Result(options.record(), describe_machine(options.ranks), rows)
