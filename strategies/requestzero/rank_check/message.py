"""The text of the error that all ranks raise, composed from their reports; and reasons by rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from requestzero.rank_check.intent import Kind
from requestzero.rank_check.rank_report import RankReport

HINT = (
    "All data-parallel ranks have to run the same requests with the same number of micro-batches over the same "
    "parameters, and to step and to end together."
)
PARAMETERS_HINT = (
    "Where parameters take part on some ranks only (adapters, experts, conditional branches), set "
    "rank_dependent_parameters=true; at stage 3 make their module a leaf module (zero_optimization.leaf_module)."
)
CHECKPOINT_HINT = (
    "All data-parallel ranks have to save, or to load, the checkpoint of one tag; where a load is given none, the file "
    "latest names it, which may differ between the disks of nodes."
)
ENGINES_HINT = "All data-parallel ranks have to use their engines in the same order."
ABORT_HINT = (
    "A request is aborted by all ranks together, or with the option abort by one of them before its backward. Inside a "
    "backward at stages 2 and 3 one alone cannot: restart from the last checkpoint."
)
_NAMES_SHOWN = 5


def compose(reports: Sequence[RankReport | None], head: str | None = None) -> str:
    """Compose the error's text.

    Args:
        reports: of all ranks, by rank; ``None`` where a rank has sent none.
        head: first line; by default that the ranks disagree, with advice at the end.
    """
    sent = [report for report in reports if report is not None]
    if any(report.place[0] == Kind.FAILURE for report in sent):
        head = "A data-parallel rank cannot go on:"
    texts = [_text(report, sent) for report in reports]
    lines = [f"  {_ranks([r for r, t in enumerate(texts) if t == text])}: {text}" for text in dict.fromkeys(texts)]
    if head is not None:
        return "\n".join([head, *lines])
    return "\n".join(["The data-parallel ranks disagree about what comes next:", *lines, _hint(sent)])


def _hint(sent: list[RankReport]) -> str:
    if any(report.place[0] == Kind.ABORT for report in sent):
        return ABORT_HINT
    if _engines_differ(sent):
        return ENGINES_HINT
    if all(report.place[0] == Kind.CHECKPOINT for report in sent):
        return CHECKPOINT_HINT
    return PARAMETERS_HINT if _orders_differ(sent) else HINT


def _text(report: RankReport | None, sent: list[RankReport]) -> str:
    if report is None:
        return "has not said (it computes, or has ended)"
    difference = _difference(report, sent) if _orders_differ(sent) else ""
    return report.text + difference + _window(report, sent) + _engine(report, sent)


def _engine(report: RankReport, sent: list[RankReport]) -> str:
    """Return the name of the report's engine, where the ranks use several."""
    return "" if not _engines_differ(sent) else f" ({report.engine.rpartition('/')[2]} of these ranks)"


def _engines_differ(sent: list[RankReport]) -> bool:
    return len({report.engine for report in sent}) > 1


def _window(report: RankReport, sent: list[RankReport]) -> str:
    """Return the size of the window, where that is the difference between ranks with the same text."""
    if len({other.window for other in sent if other.text == report.text}) == 1:
        return ""
    return f"; micro-batches in its update window: {report.window}"


def _orders_differ(sent: list[RankReport]) -> bool:
    """Return true if ranks are in the reduction of the same micro-batch, one of them in an order of its own."""
    kinds = {report.place[0] for report in sent}
    return Kind.ORDER in kinds and kinds <= {Kind.ORDER, Kind.REDUCTION} and len({str(r.place[1:]) for r in sent}) == 1


def _difference(report: RankReport, sent: list[RankReport]) -> str:
    """Name the parameters from where the orders differ, first of all those that not all ranks have had until now."""
    orders = [other.parameters or [] for other in sent]
    common = next((i for i, names in enumerate(zip_longest(*orders)) if len(set(names)) > 1), len(orders[0]))
    rest = (report.parameters or [])[common:]
    alone = [name for name in rest if not all(name in order for order in orders)]
    return f"; where the ranks part: {_names(alone or rest) or 'nothing yet'}"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _ranks(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def by_rank(reasons: Sequence[str | None]) -> str:
    """Return the reasons of the ranks that have one, in one line; ``None`` for a rank without."""
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None)
