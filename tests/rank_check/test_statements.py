"""What ranks say of themselves, and how the error puts it together."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

from requestzero.rank_check.schedule import Schedule
from requestzero.rank_check.statement import NUMBERS, Account, Kind, Statement, compose


def test_numbers_differ_where_statements_do_and_not_where_only_the_text_does() -> None:
    statement = Statement(Kind.REQUEST, 3, 0, 2, (4, 1), "'a'", "text")
    alike = Statement(Kind.REQUEST, 3, 0, 2, (4, 1), "'a'", "another text")
    assert statement.numbers() == alike.numbers()
    assert len(statement.numbers()) == NUMBERS
    assert all(abs(number) < 2**63 for number in statement.numbers())
    others = [
        Statement(Kind.STEP, 3, 0, 2, (4, 1), "'a'"),
        Statement(Kind.REQUEST, 3, 0, 2, (4, 0), "'a'"),
        Statement(Kind.REQUEST, 3, 0, 2, (4, 1), "'b'"),
        Statement(Kind.REQUEST, 3, 0, 3, (4, 1), "'a'"),
    ]
    assert all(other.numbers() != statement.numbers() for other in others)


def account(kind: Kind, text: str, parameters: list[str] | None = None) -> Account:
    return Account([kind, 1, 0], text, parameters)


def test_ranks_that_say_the_same_share_a_line() -> None:
    begins, steps = account(Kind.REQUEST, "begins"), account(Kind.STEP, "steps")
    lines = compose([begins, begins, begins, steps, begins, None]).splitlines()
    assert lines[1:4] == [
        "  ranks 0-2, 4: begins",
        "  rank 3: steps",
        "  rank 5: has not said (it computes, or has ended)",
    ]


def test_a_failure_is_the_head_line() -> None:
    text = compose([account(Kind.REQUEST, "begins"), account(Kind.FAILURE, "failed: OSError")])
    assert text.startswith("A data-parallel rank cannot go on:")


def test_parameters_are_named_where_they_differ() -> None:
    many = [f"extra.{i}" for i in range(7)]
    text = compose([account(Kind.REDUCTION, "reduces", ["a", *many]), account(Kind.ORDER, "reduces", ["a", "b"])])
    assert "rank 0: reduces; where the ranks part: extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more\n" in text
    assert "rank 1: reduces; where the ranks part: b\n" in text
    order = compose([account(Kind.REDUCTION, "reduces", ["a", "b"]), account(Kind.ORDER, "reduces", ["b", "a"])])
    assert "rank 1: reduces; where the ranks part: b, a\n" in order
    assert "rank_dependent_parameters=true" in order


def test_accounts_travel_as_text() -> None:
    original = account(Kind.ORDER, "reduces", ["a"])
    assert Account.parse(original.dump()) == original


def run(schedule: Schedule, *flushes: tuple[int, ...]) -> list[bool]:
    """Which of the flushes, and the end, need no agreement."""
    schedule.restart()
    needless = [schedule.follows(flush) for flush in flushes] + [schedule.ends()]
    schedule.adopt()
    return needless


def test_only_a_new_order_has_to_be_agreed_on() -> None:
    schedule = Schedule()
    assert run(schedule, (1, 2), (3,)) == [False, False, False]
    assert run(schedule, (1, 2), (3,)) == [True, True, True]
    assert run(schedule, (1, 2)) == [True, False]
    assert run(schedule, (1, 2)) == [True, True]
    assert run(schedule, (2,), (1,)) == [False, False, False]
    schedule.follows((2,))  # an interrupted backward is forgotten
    assert run(schedule, (2,), (1,)) == [True, True, True]


def test_waiting_for_a_device_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from requestzero.rank_check import device

    event = SimpleNamespace(record=lambda stream: None, query=lambda: False)
    accelerator = SimpleNamespace(Event=lambda: event, current_stream=lambda: None)
    monkeypatch.setattr(device, "get_accelerator", lambda: accelerator)
    work = device.QueuedWork()
    with pytest.raises(RuntimeError, match="still at work"):
        work.wait(timedelta(milliseconds=5))
    event.query = lambda: True
    work.wait(timedelta(milliseconds=5))
    assert work.is_completed()
