"""Waits for collectives, as far as they need no ranks."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from requestzero.agreement.errors import RankDisagreement
from requestzero.agreement.statement import Account, Kind
from requestzero.agreement.watch import Watch


class DoneSince:
    """Work that is completed right after a wait for it has given up, well or with an error."""

    def __init__(self, error: str | None) -> None:
        self.waits, self._error = 0, error

    def wait(self, timeout: timedelta) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return True


def watch_alone() -> Watch:
    board: Any = SimpleNamespace(
        wait_for_verdict=lambda seconds: None,
        accounts=lambda: [None],
        decide=lambda text: text,
        acknowledge=lambda: None,
        all_know=lambda: True,
    )
    return Watch(board, rank=0)


def wait_for(work: DoneSince) -> bool:
    return watch_alone().wait(work, lambda: Account([Kind.REQUEST, 1, 0], "begins"))


def test_a_rank_that_comes_as_a_wait_gives_up_is_not_lost() -> None:
    assert wait_for(DoneSince(None))


def test_a_connection_that_breaks_as_a_wait_gives_up_is_lost() -> None:
    with pytest.raises(RankDisagreement, match=r"was lost \(Connection closed by peer\)"):
        wait_for(DoneSince("Connection closed by peer"))
