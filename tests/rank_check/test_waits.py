"""Waits of one rank, without others: when they end, when they are given up, when no time is set for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from requestzero.errors import RankDisagreementError
from requestzero.rank_check import agreement, mailbox
from requestzero.rank_check.intent import Kind
from requestzero.rank_check.rank_report import RankReport
from requestzero.rank_check.standstill import Standstill
from requestzero.rank_check.watch import Watch
from requestzero.zero.stage_1_and_2.bucket import Bucket
from requestzero.zero.stage_1_and_2.gradient_reduction import GradientReduction
from support.polling import polling_every


class Work:
    """Done, and was not when it was waited for first: the wait ended just before it; or it has failed."""

    def __init__(self, failed: bool = False) -> None:
        self.failed = failed
        self.waits: list[timedelta | None] = []

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waits.append(timeout)
        if self.failed or len(self.waits) == 1:
            raise RuntimeError("Connection reset" if self.failed else "Operation timed out!")

    def is_completed(self) -> bool:
        return True


def nothing() -> RankReport:
    raise AssertionError("nothing has to be published")


withdrawn: list[bool] = []


def watch(longest_wait: float = float("inf")) -> Watch:
    mailbox: Any = SimpleNamespace(
        wait_for_result=lambda seconds: None,
        reports=lambda: [None],
        set_result=lambda text: text,
        acknowledge=lambda result: None,
        all_acknowledged=lambda result: True,
        retire=lambda: None,
        withdraw=lambda: withdrawn.append(True),
    )
    return Watch(mailbox, 0, longest_wait)


def test_what_ends_just_after_a_look_has_not_failed() -> None:
    work = Work()
    assert watch().wait(work, nothing)
    assert len(work.waits) == 2
    with pytest.raises(
        RankDisagreementError, match=r"connection to a data-parallel rank was lost \(Connection reset\)"
    ):
        watch().wait(Work(failed=True), nothing)


class Never(Work):
    """Not done, however long it is waited for."""

    def wait(self, timeout: timedelta | None = None) -> None:
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


def test_a_rank_that_comes_no_more() -> None:
    waits: Any = watch(longest_wait=0.0)
    with pytest.raises(RankDisagreementError, match=r"has not come within 0 s, the process group's timeout"):
        waits.wait(Never(), nothing)


STEPS = RankReport([Kind.APPLY, 1, 0], "steps")
REDUCES = RankReport([Kind.REDUCTION, 1, 0], "reduces")


def watch_with_reports(reports: Callable[[], list[RankReport]]) -> Any:
    """Return a watch that sees all ranks wait, with these reports at each look."""
    waits: Any = watch()
    waits._mailbox = SimpleNamespace(
        **vars(waits._mailbox)
        | {
            "publish": lambda report: None,
            "confirm": lambda: None,
            "result": lambda: None,
            "all_wait": lambda: True,
            "reports": reports,
            "set_result": lambda text, engines=(): text,
        }
    )
    return waits


@pytest.mark.parametrize("served", [False, True])
def test_only_a_rank_that_looks_again_still_waits(served: bool) -> None:
    """A report is no news of a rank that its machine does not serve: its collective may be over."""
    looks = count()
    with polling_every(0.0):
        waits = watch_with_reports(
            lambda: [replace(STEPS, looks=next(looks)), replace(REDUCES, looks=served * next(looks))]
        )
        if served:
            with pytest.raises(RankDisagreementError, match=r"rank 0: steps\n  rank 1: reduces"):
                waits.wait(Never(), lambda: STEPS)
        else:
            assert not waits.wait(Never(), lambda: STEPS, limit=0.2)


def test_a_rank_that_goes_on_while_it_is_read_does_not_stand_still() -> None:
    """Its looks are read after its report, and may be those of its next wait."""
    first, stale = [[replace(each, looks=looks) for each in (STEPS, REDUCES)] for looks in (0, 4)]
    looks = iter([first, stale])
    with polling_every(0.0):
        waits = watch_with_reports(lambda: next(looks, [stale[0], replace(stale[1], place=[Kind.STEP, 1, 0])]))
        assert not waits.wait(Never(), lambda: STEPS, limit=0.2)
    assert not list(looks)


def test_a_report_that_is_withdrawn_is_followed_by_another() -> None:
    reports = iter([[STEPS, None], [STEPS, None], [STEPS, REDUCES]])
    waits = watch_with_reports(lambda: next(reports))
    with pytest.raises(RankDisagreementError, match=r"rank 0: steps\n  rank 1: reduces"):
        waits.disagree(STEPS)


def test_a_rank_that_comes_to_the_same_place_again_is_in_another_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(mailbox, "_get_default_store", lambda: store)
    ranks = [mailbox.Mailbox("engine", "ranks", rank, world_size=2) for rank in (0, 1)]
    standstill, lasts = Standstill(), []
    for rank, report in zip(ranks, (STEPS, REDUCES), strict=True):
        rank.publish(report)
    for again in (False, True, False):
        if again:
            ranks[1].withdraw()
            ranks[1].publish(REDUCES)
        lasts.append(standstill.lasts(ranks[0].reports()))
        for rank in ranks * 4:
            rank.confirm()
    assert lasts == [False, False, True]


def test_an_interrupted_wait_leaves_no_report() -> None:
    work, before = Work(), len(withdrawn)
    with patch.object(work, "wait", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        watch().wait(work, nothing)
    assert len(withdrawn) == before + 1


def test_a_device_s_collective_is_waited_for_without_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes a time that is over for a failure of its communicator."""
    queued = Work()
    monkeypatch.setattr(agreement, "QueuedWork", lambda: queued)
    waits: Any = agreement.RankAgreement(SimpleNamespace(), watch(), SimpleNamespace, str)  # type: ignore[arg-type]
    collective: Any = SimpleNamespace(timeouts=[])
    collective.wait = lambda *timeout: collective.timeouts.append(timeout)
    waits.wait_for_batch(collective, torch.device("cuda"))
    assert collective.timeouts == [()]
    assert queued.waits
    on_cpu = Work()
    waits.wait_for_batch(on_cpu, torch.device("cpu"))
    assert None not in on_cpu.waits


def test_an_empty_bucket_is_not_reduced() -> None:
    """With the collectives out of reach."""
    reduction: Any = SimpleNamespace()
    GradientReduction._reduce_bucket(reduction, Bucket(torch.float32, torch.float32, 8, buffers=0, total=8))
