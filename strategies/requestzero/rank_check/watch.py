"""Waits that end where the ranks wait for different things, and the error in which they end."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import NoReturn, Protocol

from requestzero.errors import RankDisagreementError
from requestzero.rank_check.board import Board
from requestzero.rank_check.statement import Account, compose

_LOOK_EVERY = timedelta(seconds=1)
# Where all wait, rank 0 is among them, and compares for all: a thousand ranks would keep the store busy. The others do
# in case it has gone.
_OTHERS_COMPARE_EVERY = 10
# For how long a rank that knows the verdict waits for the others to know it: the store may end with its process.
_FAREWELL = 10.0


class Work(Protocol):
    """What can be waited for: of ``torch.distributed``, or an event of a device."""

    def wait(self, timeout: timedelta, /) -> object: ...

    def is_completed(self) -> bool: ...


class Watch:
    """Waits for collectives on behalf of one engine.

    A wait of less than a second costs nothing but the wait. After that the rank publishes what it waits for, and looks
    once a second whether there is a verdict, or whether all ranks wait. If they do, at different places and twice in a
    row, then no rank will ever come to where another waits.
    """

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self.error: RankDisagreementError | None = None
        """Once the ranks have disagreed."""

    def wait(
        self, work: Work, describe: Callable[[], Account], limit: float = float("inf"), at_once: bool = False
    ) -> bool:
        """Wait for ``work``; false if it is not done after ``limit`` seconds.

        Args:
            work: is done when the ranks have come to it.
            describe: what this rank waits for; called when it has to be published.
            limit: seconds.
            at_once: publish before waiting.

        Raises:
            RankDisagreementError: the ranks wait for different things, one of them cannot go on or is lost.
        """
        published: list[Account] = []
        seen: list[Account | None] = []
        start = time.monotonic()
        if at_once:
            self._publish(describe(), published)
        for look in count(1):
            if self._arrived(work):
                break
            if time.monotonic() - start > limit:
                return False
            seen = self._look(describe, published, seen, compares=self._rank == 0 or look % _OTHERS_COMPARE_EVERY == 0)
        if published:
            self._board.withdraw()
        return True

    def _publish(self, account: Account, published: list[Account]) -> None:
        self._board.publish(account)
        published.append(account)

    def _arrived(self, work: Work) -> bool:
        try:
            work.wait(_LOOK_EVERY)
        except RuntimeError:
            if not work.is_completed():  # only the wait has ended
                return False
            self._end(work)
        return True

    def _end(self, work: Work) -> None:
        """Of work that is completed: with an error of its own, or just after a wait for it has given up."""
        try:
            work.wait(_LOOK_EVERY)
        except RuntimeError as error:
            self._lost(error)

    def _look(
        self, describe: Callable[[], Account], published: list[Account], before: list[Account | None], compares: bool
    ) -> list[Account | None]:
        """Once a second; returns the accounts of all ranks if all of them wait."""
        try:
            verdict = self._board.verdict()
            if verdict is None and not published:
                self._publish(describe(), published)
            if not compares and verdict is None:
                return before
            accounts = self._board.accounts() if verdict is None and self._board.all_wait() else []
            if len({str(account and account.place) for account in accounts}) > 1 and accounts == before:
                verdict = self._board.decide(compose(accounts))
        except RuntimeError as error:
            self._lost(error)
        if verdict is not None:
            self.conclude(verdict)
        return accounts

    def disagree(self, account: Account, seconds: float = _FAREWELL) -> NoReturn:
        """All ranks know from one collective that they disagree, and come here: gather what they have to say."""
        self._board.publish(account)
        deadline = time.monotonic() + seconds
        if self._rank == 0:
            while not self._board.all_wait() and time.monotonic() < deadline:
                time.sleep(0.01)
            self.conclude(self._board.decide(compose(self._board.accounts())))
        verdict = self._board.wait_for_verdict(seconds)
        self.conclude(self._board.decide(compose(self._board.accounts())) if verdict is None else verdict)

    def give_up(self) -> NoReturn:
        """No other rank has come within the limit of a wait: leave the verdict for when they do."""
        self.conclude(self._board.decide(compose(self._board.accounts())), farewell=0.0)

    def leave(self, account: Account) -> None:
        """Say for good why this rank will come to nothing that others wait for."""
        with suppress(RuntimeError):  # the store has ended with its process
            self._board.publish(account)
            self._board.acknowledge()

    def conclude(self, verdict: str, cause: BaseException | None = None, farewell: float = _FAREWELL) -> NoReturn:
        """Raise the verdict once the other ranks know it too, or after ten seconds."""
        self.error = RankDisagreementError(verdict)
        deadline = time.monotonic() + farewell
        with suppress(RuntimeError):  # the store has ended: the others know, or cannot learn it any more
            self._board.acknowledge()
            while not self._board.all_know() and time.monotonic() < deadline:
                time.sleep(0.05)
        if cause is None:
            raise self.error
        raise self.error from cause

    def _lost(self, error: RuntimeError) -> NoReturn:
        """A connection has broken: say why, if another rank has told."""
        head = f"The connection to a data-parallel rank was lost ({error}):"
        try:
            verdict = self._board.wait_for_verdict(_LOOK_EVERY.total_seconds())
            if verdict is None:
                verdict = self._board.decide(compose(self._board.accounts(), head))
        except RuntimeError:
            verdict = f"{head} what it had to say is in its own log."
        self.conclude(verdict, error, farewell=2.0)
