"""The probe on a GPU, with all its columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from requestzero.doctor.verify.result import Check
from requestzero.doctor.verify.slow_windows import LAYERS, WIDTH

_MEASURED = ("bytes_between_requests", "bytes_at_peak", "backward_seconds", "boundary_seconds", "step_seconds")


def measure_columns(
    ranks: int, stage_3: bool, report: Callable[[str], None]
) -> tuple[list[Check], list[dict[str, Any]]]:
    """Run the probe with all its columns on this rank; return whether they are filled, and its rows (collective)."""
    from requestzero.probe.measure import measure_all
    from requestzero.probe.models import ModelChoice
    from requestzero.probe.options import COLUMNS, DEFAULT_OUT, STAGES, Options

    options = Options(
        ranks=ranks,
        device="cuda",
        model=ModelChoice(LAYERS, WIDTH),
        stages=STAGES if stage_3 else (1, 2),
        dtype="bf16",
        windows=6,
        timed_windows=8,
        requests=2,
        columns=tuple(COLUMNS),
        full=False,
        only="",
        seed=0,
        out=DEFAULT_OUT,
        html=None,
    )
    rows = measure_all(options, report)
    ours = [row for row in rows if row.engine.requestzero]
    errors = [f"{row.configuration}, {row.engine}: {text}" for row in ours for text in row.errors.values()]
    wrong = sum(row.values.get("wrong_updates", 0) for row in ours)
    filled = all(row.values.get(name, 0) > 0 for row in ours for name in _MEASURED)
    checks = [
        Check("the probe runs every configuration", not errors, "; ".join(errors)),
        Check("the probe finds no wrong update", wrong == 0, f"{wrong} wrong" if wrong else ""),
        Check("the probe's columns of memory and time are filled", filled),
    ]
    return checks, [row.record() for row in rows]
