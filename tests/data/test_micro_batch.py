"""The unit that loaders yield."""

from __future__ import annotations

import pytest

from requestzero import MicroBatch


def test_a_plain_micro_batch_is_one_whole_request() -> None:
    micro_batch = MicroBatch(inputs=[1, 2])
    assert micro_batch.request_end
    assert micro_batch.window_end is None


def test_a_window_cannot_end_inside_a_request() -> None:
    message = r"MicroBatch of request 'a' has window_end=True and request_end=False: .*Set request_end=True\."
    with pytest.raises(ValueError, match=message):
        MicroBatch(inputs=None, request_end=False, window_end=True, request_id="a")


@pytest.mark.parametrize("weight", [-1, float("nan"), "3", True])
def test_a_weight_is_a_number_of_at_least_zero(weight: object) -> None:
    with pytest.raises(ValueError, match=rf"^weight={weight!r} is not allowed: use a finite number of at least 0"):
        MicroBatch("inputs", weight=weight)
