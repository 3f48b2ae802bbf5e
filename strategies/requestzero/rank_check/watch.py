"""Waits that end in an error where the ranks wait for different things."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import NoReturn, Protocol

from requestzero.errors import RankDisagreementError
from requestzero.rank_check.mailbox import Mailbox
from requestzero.rank_check.message import compose
from requestzero.rank_check.rank_report import RankReport
from requestzero.rank_check.standstill import Standstill

_POLL_INTERVAL = timedelta(seconds=1)
# Where all ranks wait, rank 0 is among them and compares the reports for all: a thousand ranks would overload the
# store. The others compare seldom, in case rank 0 has gone.
_POLLS_OF_OTHERS = 10
# Seconds for which a rank that has the result waits for the others to get it: the store may end with its process.
_GRACE_PERIOD = 10.0


class Work(Protocol):
    """Something to wait for: a collective of ``torch.distributed``, or an event of a device."""

    def wait(self, timeout: timedelta, /) -> object: ...

    def is_completed(self) -> bool: ...


class Watch:
    """Waits for collectives on behalf of one engine.

    A wait of less than a second costs nothing but the wait. After that the rank publishes a report, and polls once a
    second for a result, or for all ranks to wait. If they do, at different places and in several looks of each, then no
    rank will ever come to where another waits. A rank that computes publishes nothing, and is never taken for stuck.

    Args:
        mailbox: of the group's ranks.
        rank: of this process in the group.
        longest_wait: seconds after which a rank that has not come is given up: it may have been stopped.
    """

    def __init__(self, mailbox: Mailbox, rank: int, longest_wait: float = float("inf")) -> None:
        self._mailbox, self._rank, self._longest_wait = mailbox, rank, longest_wait
        self.error: RankDisagreementError | None = None
        """The error that was raised, once the ranks have disagreed."""
        self.last_abort = ""
        """Ranks that have just aborted a request, with their reasons: what may have ended one of them since."""

    def wait(
        self, work: Work, describe: Callable[[], RankReport], limit: float = float("inf"), at_once: bool = False
    ) -> bool:
        """Wait for ``work``; return false if it is not done after ``limit`` seconds.

        Args:
            work: is done when the ranks have come to it.
            describe: returns the report of this wait; called when it has to be published.
            limit: seconds.
            at_once: publish before waiting.

        Raises:
            RankDisagreementError: the ranks wait for different things, or one of them cannot go on, is lost, or has not
                come within the longest wait.
        """
        try:
            return self._wait(work, describe, limit, at_once)
        except BaseException:  # an interrupt too: no report may stay behind, which other engines would see
            with suppress(RuntimeError):  # the store has ended with its process
                self._mailbox.withdraw()
            raise

    def _wait(self, work: Work, describe: Callable[[], RankReport], limit: float, at_once: bool) -> bool:
        published: list[RankReport] = []
        standstill = Standstill()
        start = time.monotonic()
        if at_once:
            self._publish(describe(), published)
        for poll in count(1):
            if self._completed(work):
                break
            waited = time.monotonic() - start
            if waited > limit:
                return False
            if waited > self._longest_wait:
                self._give_others_up()
            compares = self._rank == 0 or poll % _POLLS_OF_OTHERS == 0
            self._poll(describe, published, standstill if compares else None)
        if published:
            self._mailbox.withdraw()
        return True

    def _publish(self, report: RankReport, published: list[RankReport]) -> None:
        self._mailbox.publish(report)
        published.append(report)

    def _completed(self, work: Work) -> bool:
        """Wait for one interval; return true if the work is completed."""
        try:
            work.wait(_POLL_INTERVAL)
        except RuntimeError:
            if not work.is_completed():  # only the wait has ended
                return False
            self._raise_error_of(work)
        return True

    def _raise_error_of(self, work: Work) -> None:
        """Raise the error of completed work, if it has one: a wait may also have timed out just before the end."""
        try:
            work.wait(_POLL_INTERVAL)
        except RuntimeError as error:
            self._connection_lost(error)

    def _poll(
        self, describe: Callable[[], RankReport], published: list[RankReport], standstill: Standstill | None
    ) -> None:
        """Look for a result, and where ``standstill`` is given for one of all ranks."""
        try:
            result = self._mailbox.result()
            if result is None:
                self._report(describe, published)
                if standstill is not None and self._mailbox.all_wait():
                    result = self._compare(standstill)
        except RuntimeError as error:
            self._connection_lost(error)
        if result is not None:
            self.raise_result(result)

    def _report(self, describe: Callable[[], RankReport], published: list[RankReport]) -> None:
        if published:
            self._mailbox.confirm()
        else:
            self._publish(describe(), published)

    def _compare(self, standstill: Standstill) -> str | None:
        """Return the result if all ranks stand still; else ``None``."""
        if not standstill.lasts(self._mailbox.reports()):
            return None
        reports = self._mailbox.reports()
        if not standstill.lasts(reports):  # a rank has gone on between the reads of its report and of its looks
            return None
        return self._mailbox.set_result(compose(reports), {each.engine for each in reports if each is not None})

    def disagree(self, report: RankReport, seconds: float = _GRACE_PERIOD) -> NoReturn:
        """Gather the reports after a comparison by which all ranks know that they disagree, and raise."""
        self._mailbox.publish(report)
        deadline = time.monotonic() + seconds
        if self._rank == 0:
            self.raise_result(self._mailbox.set_result(compose(self._reports_by(deadline))))
        result = self._mailbox.wait_for_result(seconds)
        self.raise_result(self._set_result() if result is None else result)

    def _reports_by(self, deadline: float) -> list[RankReport | None]:
        """Return the reports once every rank has one; at the deadline those that there are.

        A rank withdraws its report when its wait is over, a moment before it publishes why it cannot go on.
        """
        while time.monotonic() < deadline:
            if self._mailbox.all_wait():
                reports = self._mailbox.reports()
                if None not in reports:
                    return reports
            time.sleep(0.01)
        return self._mailbox.reports()

    def give_up(self) -> NoReturn:
        """Raise although no other rank has come within the limit of a wait; leave the result for when they do."""
        self.raise_result(self._set_result(), grace_period=0.0)

    def leave(self, report: RankReport) -> None:
        """Publish for good why this rank will come to nothing that others wait for."""
        with suppress(RuntimeError):  # the store has ended with its process
            self._mailbox.leave(report)

    def raise_result(
        self, result: str, cause: BaseException | None = None, grace_period: float = _GRACE_PERIOD
    ) -> NoReturn:
        """Raise the result once all ranks have it, or after the grace period."""
        self.error = RankDisagreementError(result)
        deadline = time.monotonic() + grace_period
        with suppress(RuntimeError):  # the store has ended: the others have the result, or cannot get it any more
            self._mailbox.acknowledge(result)
            while not self._mailbox.all_acknowledged(result) and time.monotonic() < deadline:
                time.sleep(0.05)
            self._mailbox.retire()
        if cause is None:
            raise self.error
        raise self.error from cause

    def _set_result(self, head: str | None = None) -> str:
        return self._mailbox.set_result(compose(self._mailbox.reports(), head))

    def _give_others_up(self) -> NoReturn:
        """Raise although nothing is known of the ranks that have not come."""
        head = f"A data-parallel rank has not come within {self._longest_wait:g} s, the process group's timeout:"
        self.raise_result(self._set_result(head), grace_period=2.0)

    def _connection_lost(self, error: RuntimeError) -> NoReturn:
        """Raise for a broken connection, with the reason if another rank has reported one."""
        before = f" right after a request was aborted by {self.last_abort}" if self.last_abort else ""
        head = f"The connection to a data-parallel rank was lost{before} ({error}):"
        try:
            result = self._mailbox.wait_for_result(_POLL_INTERVAL.total_seconds())
            if result is None:
                result = self._set_result(head)
        except RuntimeError:
            result = f"{head} what it had to say is in its own log."
        self.raise_result(result, error, grace_period=2.0)
