"""Report of a run: a table of its results, and the lines of data that were left out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from requestzero.planning import PlanStatistics


def checkpoint_directory(output_dir: Path) -> Path:
    """Return the directory of a run's checkpoints."""
    return output_dir / "checkpoints"


@dataclass(frozen=True)
class RunSummary:
    """Results of a run."""

    first_loss: float
    """Nats per trained token, mean of the first update window, before its update."""
    last_loss: float
    updates_applied: int
    updates_skipped: int
    """Updates whose gradient was not finite."""
    requests_dropped: int
    """Requests that were left out of their updates (overflow.on_overflow=drop_request)."""
    requests: int
    micro_batches: int
    """Per rank, fillers included."""
    tokens_per_second: float
    """Trained tokens, over all ranks."""
    bytes_between_requests: int
    """Bytes of the gradient partition on the accelerator after a request within a window, the largest of any rank."""
    bytes_at_peak: int
    plan: PlanStatistics
    """Statistics of the plan, and of a naive split of the same requests."""
    checkpoint: Path
    logs: Path
    skipped_lines: list[str]
    """Lines and texts of the data file that were left out, each with the reason."""


def print_report(console: Console, summary: RunSummary) -> None:
    """Print the summary as a table, with skipped lines of data above it."""
    for line in summary.skipped_lines:
        console.print(f"left out: {line}", markup=False, highlight=False)
    if summary.skipped_lines:
        count = len(summary.skipped_lines)
        console.print(f"{count} lines or texts of the data were left out (data.on_bad_line, data.on_long_text).")
    table = Table(title="requestzero: end of run", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(summary).items():
        table.add_row(name, value)
    console.print(table)


def _shown(path: Path) -> str:
    """Return a path relative to the working directory, if it lies in there."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _rows(summary: RunSummary) -> dict[str, str]:
    return {
        "loss, first": f"{summary.first_loss:.4f}",
        "loss, last": f"{summary.last_loss:.4f}",
        "updates applied": f"{summary.updates_applied:,}",
        "updates skipped": f"{summary.updates_skipped:,}",
        "requests": f"{summary.requests:,}",
        "requests dropped": f"{summary.requests_dropped:,}",
        "micro-batches per rank": f"{summary.micro_batches:,}",
        **_plan_rows(summary.plan),
        "tokens per second": f"{summary.tokens_per_second:,.0f}",
        "gradient partition between requests": f"{summary.bytes_between_requests:,} bytes",
        "gradient partition at peak": f"{summary.bytes_at_peak:,} bytes",
        "checkpoint": _shown(summary.checkpoint),
        "logs": _shown(summary.logs),
    }


def _plan_rows(plan: PlanStatistics) -> dict[str, str]:
    """Return the rows of the plan, with the naive plan in brackets: in order, a fixed number per rank, padded."""
    ours, naive = plan.planned, plan.naive
    return {
        "tokens": f"{plan.tokens:,} in {plan.sequences:,} sequences",
        "padding": f"{ours.padding(plan.tokens):.1%} of the tokens computed (naive: {naive.padding(plan.tokens):.1%})",
        "fillers": f"{ours.fillers:,} of {ours.micro_batches:,} micro-batches on all ranks "
        f"(naive: {naive.fillers:,} of {naive.micro_batches:,})",
        "imbalance": f"busiest rank {ours.imbalance:.1%} above the mean (naive: {naive.imbalance:.1%})",
    }
