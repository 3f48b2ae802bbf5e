"""Ranks that all wait, at different places: none of them will ever come to where another waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from requestzero.rank_check.rank_report import RankReport

# The first may come from a rank that was not served for a while, before it finds that its wait is over. More of them,
# since the thread that receives for a rank may not be served while another one of it confirms.
_LOOKS = 4


class Standstill:
    """Follows the reports of all ranks during one wait.

    A report says where a rank has waited, not that it still does: a collective may be over on one rank, which goes on
    and waits elsewhere, while another has not been given the processor to notice. So each rank confirms its report
    after every interval of its wait, and a standstill is one in which all have done so since they were seen in it. A
    rank that has gone on and waits there again, as in a loop of evaluations, is in another wait.
    """

    def __init__(self) -> None:
        self._first: list[RankReport] = []

    def lasts(self, reports: Sequence[RankReport | None]) -> bool:
        """Return true if the ranks stand still, given what they report now: ``None`` for one that does not wait."""
        sent = [report for report in reports if report is not None]
        if len(sent) < len(reports) or len({str((each.engine, each.place)) for each in sent}) < 2:
            sent = []
        if not sent or [_place(each) for each in sent] != [_place(each) for each in self._first]:
            self._first = sent
            return False
        return all(_looks(now, first) for now, first in zip(sent, self._first, strict=True))


def _place(report: RankReport) -> RankReport:
    return replace(report, looks=None)


def _looks(now: RankReport, first: RankReport) -> bool:
    return now.looks is None or first.looks is None or now.looks - first.looks >= _LOOKS
