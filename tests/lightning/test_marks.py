"""Ends of requests and windows that a loader's batches carry."""

from __future__ import annotations

import pytest

from requestzero import MicroBatch
from requestzero.data.boundaries import WindowMarks, unwrap


def ends(marks: WindowMarks, batches: list[object], requests_per_update: int) -> list[tuple[bool, bool, bool]]:
    result = []
    for batch in batches:
        marks.take(batch, requests_per_update)
        result.append((marks.starts_window, marks.request_end, marks.window_end))
    return result


def test_plain_batches_are_requests() -> None:
    assert ends(WindowMarks(), [1, 2, 3, 4, 5], 2) == [
        (True, True, False),
        (False, True, True),
        (True, True, False),
        (False, True, True),
        (True, True, False),
    ]


def test_nothing_is_pending_before_the_first_batch() -> None:
    assert WindowMarks().window_end is True


def test_requests_are_counted_not_micro_batches() -> None:
    batches = [MicroBatch(0, request_end=end) for end in (False, False, True, True, False, True)]
    assert [end for _, _, end in ends(WindowMarks(), batches, 2)] == [False, False, False, True, False, False]


def test_an_epoch_starts_with_a_new_window() -> None:
    marks = WindowMarks()
    ends(marks, [1, 2, 3], 2)
    marks.end_epoch()
    assert ends(marks, [4, 5], 2) == [(True, True, False), (False, True, True)]
    # Another epoch may come from a loader that marks windows.
    marks.end_epoch()
    assert ends(marks, [MicroBatch(0, window_end=True)], 1) == [(True, True, True)]


def test_a_batch_that_is_left_out_counts_for_nothing() -> None:
    marks = WindowMarks()
    ends(marks, [1], 2)
    marks.skip()
    assert (marks.starts_window, marks.window_end) == (False, False)
    assert ends(marks, [2, 3], 2) == [(False, True, True), (True, True, False)]


def test_inputs_are_unwrapped() -> None:
    assert WindowMarks().take(MicroBatch({"x": 1}), 1) == {"x": 1}
    assert unwrap(MicroBatch({"x": 1}, request_end=False)) == {"x": 1}
    assert unwrap([1, 2]) == [1, 2]


@pytest.mark.parametrize("batch", [{"a": MicroBatch(1), "b": 2}, [MicroBatch(1)], (1, MicroBatch(1))])
def test_micro_batch_inside_a_batch(batch: object) -> None:
    with pytest.raises(ValueError, match="holds a MicroBatch: the MicroBatch has to be the batch itself"):
        WindowMarks().take(batch, 1)
    with pytest.raises(ValueError, match="holds a MicroBatch"):
        unwrap(batch)


def test_window_ends_on_some_micro_batches() -> None:
    marks = WindowMarks()
    marks.take(MicroBatch(0, window_end=False), 1)
    with pytest.raises(ValueError, match="request 'late' has window_end=None, unlike the ones before it"):
        marks.take(MicroBatch(0, request_id="late"), 1)


def test_window_ends_beside_accumulate_grad_batches() -> None:
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=4\) asks to count requests"):
        WindowMarks("accumulate_grad_batches", owner="Trainer").take(MicroBatch(0, window_end=True), 4)


def ahead(marks: WindowMarks, batches: list[object], requests_per_update: int) -> list[tuple[int | None, bool | None]]:
    """Micro-batches and window end of every request, as known at its first batch."""
    known = []
    for batch in batches:
        marks.take(batch, requests_per_update)
        if marks.starts_request:
            known.append((marks.micro_batches, marks.window_ends_with_request))
    return known


def test_what_a_first_batch_says_of_its_request() -> None:
    assert ahead(WindowMarks(), [1, 2, 3], 2) == [(1, False), (1, True), (1, False)]
    counted = [MicroBatch(0, False, micro_batches=2), MicroBatch(0, True), MicroBatch(0, False), MicroBatch(0, True)]
    assert ahead(WindowMarks(), [*counted], 2) == [(2, False), (None, True)]
    marked = [MicroBatch(0, False, False), MicroBatch(0, True, True), MicroBatch(0, True, False)]
    assert ahead(WindowMarks(), [*marked], 1) == [(None, None), (1, False)]
