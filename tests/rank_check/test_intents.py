"""Intents, reports, and the error that is composed from them."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

from requestzero.rank_check.intent import NUMBERS, Intent, Kind
from requestzero.rank_check.message import compose
from requestzero.rank_check.rank_report import RankReport
from requestzero.rank_check.reduction_order import ReductionOrder


def test_numbers_differ_where_intents_do_and_not_where_only_the_text_does() -> None:
    intent = Intent(Kind.REQUEST, 3, 0, 2, (4, 1), "'a'", "text")
    alike = Intent(Kind.REQUEST, 3, 0, 2, (4, 1), "'a'", "another text")
    assert intent.numbers() == alike.numbers()
    assert len(intent.numbers()) == NUMBERS
    assert all(abs(number) < 2**63 for number in intent.numbers())
    others = [
        Intent(Kind.STEP, 3, 0, 2, (4, 1), "'a'"),
        Intent(Kind.REQUEST, 3, 0, 2, (4, 0), "'a'"),
        Intent(Kind.REQUEST, 3, 0, 2, (4, 1), "'b'"),
        Intent(Kind.REQUEST, 3, 0, 3, (4, 1), "'a'"),
    ]
    assert all(other.numbers() != intent.numbers() for other in others)


def report(kind: Kind, text: str, parameters: list[str] | None = None) -> RankReport:
    return RankReport([kind, 1, 0], text, parameters)


def test_ranks_that_say_the_same_share_a_line() -> None:
    begins, steps = report(Kind.REQUEST, "begins"), report(Kind.STEP, "steps")
    lines = compose([begins, begins, begins, steps, begins, None]).splitlines()
    assert lines[1:4] == [
        "  ranks 0-2, 4: begins",
        "  rank 3: steps",
        "  rank 5: has not said (it computes, or has ended)",
    ]


def test_a_failure_is_the_head_line() -> None:
    text = compose([report(Kind.REQUEST, "begins"), report(Kind.FAILURE, "failed: OSError")])
    assert text.startswith("A data-parallel rank cannot go on:")


def test_parameters_are_named_where_they_differ() -> None:
    many = [f"extra.{i}" for i in range(7)]
    text = compose([report(Kind.REDUCTION, "reduces", ["a", *many]), report(Kind.ORDER, "reduces", ["a", "b"])])
    assert "rank 0: reduces; where the ranks part: extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more\n" in text
    assert "rank 1: reduces; where the ranks part: b\n" in text
    order = compose([report(Kind.REDUCTION, "reduces", ["a", "b"]), report(Kind.ORDER, "reduces", ["b", "a"])])
    assert "rank 1: reduces; where the ranks part: b, a\n" in order
    assert "rank_dependent_parameters=true" in order


def test_reports_are_sent_as_text() -> None:
    original = report(Kind.ORDER, "reduces", ["a"])
    assert RankReport.parse(original.dump()) == original


def run(order: ReductionOrder, *flushes: tuple[int, ...]) -> list[bool]:
    """Return for each of the flushes, and the end, if it needs no agreement."""
    order.restart()
    needless = [order.follows(flush) for flush in flushes] + [order.ends()]
    order.adopt()
    return needless


def test_only_a_new_order_has_to_be_agreed_on() -> None:
    order = ReductionOrder()
    assert run(order, (1, 2), (3,)) == [False, False, False]
    assert run(order, (1, 2), (3,)) == [True, True, True]
    assert run(order, (1, 2)) == [True, False]
    assert run(order, (1, 2)) == [True, True]
    assert run(order, (2,), (1,)) == [False, False, False]
    order.follows((2,))  # an interrupted backward is forgotten
    assert run(order, (2,), (1,)) == [True, True, True]


def test_waiting_for_a_device_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from requestzero.rank_check import queued_work

    event = SimpleNamespace(record=lambda stream: None, query=lambda: False)
    accelerator = SimpleNamespace(Event=lambda: event, current_stream=lambda: None)
    monkeypatch.setattr(queued_work, "get_accelerator", lambda: accelerator)
    work = queued_work.QueuedWork()
    with pytest.raises(RuntimeError, match="still at work"):
        work.wait(timedelta(milliseconds=5))
    event.query = lambda: True
    work.wait(timedelta(milliseconds=5))
    assert work.is_completed()
