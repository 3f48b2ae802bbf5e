"""Intents compared one after another, and the error where they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from requestzero.rank_check.intent import Intent
from requestzero.rank_check.rank_report import RankReport
from requestzero.rank_check.watch import Watch

if TYPE_CHECKING:
    from requestzero.rank_check.channel import Channel, Round

# Seconds for which a rank that cannot go on waits for the others to get its report.
_FAILURE_GRACE_PERIOD = 10.0


class Comparison:
    """Compares at most one intent at a time, in the background until :meth:`finish`.

    Args:
        channel: for comparing.
        watch: for waiting.
        report: returns the report of an intent of this rank.
        on_abort: called where the ranks have voted to abort a request, on all of them (collective).
    """

    def __init__(
        self,
        channel: Channel,
        watch: Watch,
        report: Callable[[Intent], RankReport],
        on_abort: Callable[[], None],
    ) -> None:
        self._channel, self._watch, self._report, self._on_abort = channel, watch, report, on_abort
        self._round: Round | None = None

    def begin(self, intent: Intent) -> None:
        """Begin to compare ``intent``, after the one that is being compared."""
        self.finish()
        self._round = self._channel.compare(intent)

    def finish(self) -> None:
        """Wait for the comparison that is under way, if there is one.

        Raises:
            RankDisagreementError: the intents differ.
        """
        if self._round is not None:
            under_way = self._round
            self._watch.wait(under_way.work, lambda: self._report(under_way.intent))
            self._round, self._watch.last_abort = None, ""
            if under_way.aborts():
                self._on_abort()
            elif not under_way.agreed():
                self._watch.disagree(self._report(under_way.intent))

    def fail(self, failure: Intent) -> None:
        """Tell the other ranks that this one cannot go on, in the place of whatever they compare next.

        Returns if all ranks fail likewise.

        Raises:
            RankDisagreementError: with this rank's report.
        """
        report = RankReport.of(failure)
        if self._round is not None:
            under_way, self._round = self._round, None
            self._tell(under_way, report)
        self._tell(self._channel.compare(failure), report)

    def _tell(self, under_way: Round, report: RankReport) -> None:
        """Let a round end with ``report``; ranks that are at work are not waited for without end."""
        if not self._watch.wait(under_way.work, lambda: report, _FAILURE_GRACE_PERIOD, at_once=True):
            self._watch.give_up()
        if under_way.aborts():
            self._on_abort()  # the others wait for this rank there; the next round tells them
        elif not under_way.agreed():
            self._watch.disagree(report)
