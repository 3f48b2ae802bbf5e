"""Epochs of windows: order, window ends, bad requests, and memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from requestzero.planning import BadRequestPolicy, Budget, Planner, WindowRule
from requestzero.planning.unique_ids import repeated_places
from support.scripts import run_code

LENGTHS = [[3, 4], [5], [1, 1, 1], [8], [2, 2], [7, 1]]


def make_planner(lengths: list[list[int]] = LENGTHS, **options: Any) -> Planner:
    options = {"budget": Budget(8, layout="padded"), "shuffle": False, **options}
    return Planner(len(lengths), lengths.__getitem__, **options)


def windows(planner: Planner, world_size: int = 2, epoch: int = 0) -> list[list[int]]:
    return [[request.index for request in window.plan.requests] for window in planner.epoch(epoch, world_size)]


def ends(planner: Planner) -> list[Any]:
    return [b.window_end for window in planner.epoch(0, 1) for b in window.plan.micro_batches(0) if b.request_end]


def test_windows_end_by_requests_or_tokens() -> None:
    assert windows(make_planner(windows=WindowRule(requests=4))) == [[0, 1, 2, 3], [4, 5]]
    assert windows(make_planner(windows=WindowRule(tokens=12))) == [[0, 1], [2, 3, 4], [5]]
    assert windows(make_planner()) == [[0], [1], [2], [3], [4], [5]]
    assert ends(make_planner(windows=WindowRule(requests=4))) == [False, False, False, True, False, False]
    assert ends(make_planner(windows=WindowRule(tokens=15))) == [False, False, True, False, False, True]
    assert ends(make_planner()) == [None] * 6, "the training loop counts"


def test_windows_do_not_depend_on_the_number_of_ranks() -> None:
    planner = make_planner(windows=WindowRule(tokens=12), shuffle=True)
    assert len({str(windows(planner, world_size, epoch=3)) for world_size in (1, 2, 7)}) == 1
    assert windows(planner, epoch=3) != windows(planner, epoch=4)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_epoch_can_be_joined_at_each_window(world_size: int) -> None:
    planner = make_planner(windows=WindowRule(requests=2), shuffle=True)
    whole = list(planner.epoch(1, world_size))
    for number, window in enumerate(whole[:-1]):
        rest = planner.epoch(1, world_size, window.next_place)
        assert [list(w.plan.micro_batches(0)) for w in rest] == [
            list(w.plan.micro_batches(0)) for w in whole[number + 1 :]
        ]
    assert planner.count_micro_batches(world_size) == sum(len(window.plan) for window in whole)


NAMED = {"name": lambda index: f"r{index}"}
BAD: list[tuple[list[list[int]], dict[str, Any], str, str]] = [
    ([[3], [9]], {}, "Text 0 of request 'r1' has 9 tokens, and a micro-batch may have 8: raise", "on_long_text"),
    ([[3], []], {}, "Request 'r1' is empty: it has no text", "on_empty_request"),
    ([[3], [2, 0]], {}, "Text 1 of request 'r1' has 0 tokens: leave it out", "on_empty_request"),
    (
        [[3], [2]],
        {"trainable": [[1], [0]].__getitem__},
        "Request 'r1' has no token to train on: leave it out",
        "on_untrainable_request",
    ),
]


@pytest.mark.parametrize(("lengths", "options", "message", "policy"), BAD)
def test_a_bad_request_is_named_or_skipped_and_counted(
    lengths: list[list[int]], options: dict[str, Any], message: str, policy: str
) -> None:
    planner = make_planner(lengths, **NAMED, **options)
    for look in (lambda: list(planner.epoch(0, 2)), lambda: planner.count_micro_batches(2)):
        with pytest.raises(ValueError, match=message):
            look()
    skipping = make_planner(lengths, **NAMED, **options, policy=BadRequestPolicy(**{policy: "skip"}))
    statistics = [window.statistics for window in skipping.epoch(0, 2)]
    total = sum(statistics[1:], statistics[0])
    assert total.requests + total.skipped_requests == 2
    assert total.sequences + total.skipped_texts + (policy == "on_untrainable_request") == sum(map(len, lengths))
    assert skipping.count_micro_batches(2) == total.planned.micro_batches // 2


def test_a_long_text_is_truncated_or_alone() -> None:
    lengths = [[3, 20]]
    (window,) = make_planner(lengths, policy=BadRequestPolicy("truncate")).epoch(0, 1)
    batches = list(window.plan.micro_batches(0))
    assert sorted((b.positions, b.truncated) for b in batches) == [((0,), ()), ((1,), (1,))]
    assert (window.statistics.tokens, window.statistics.truncated_texts) == (11, 1)
    (window,) = make_planner(lengths, policy=BadRequestPolicy("own_micro_batch")).epoch(0, 1)
    assert sorted(b.positions for b in window.plan.micro_batches(0)) == [(0,), (1,)]
    assert (window.statistics.tokens, window.statistics.truncated_texts) == (23, 0)


def test_requests_left_out_are_counted_also_at_the_end() -> None:
    planner = make_planner(left_out={0, 4, 5}, windows=WindowRule(requests=3))
    assert windows(planner) == [[1, 2, 3], []]
    assert [window.statistics.skipped_requests for window in planner.epoch(0, 1)] == [1, 2]


def test_memory_does_not_grow_with_the_dataset() -> None:
    def lengths(index: int) -> list[int]:
        return [1 + index % 50] * (1 + index % 7)

    peaks = []
    for size in (2_000, 1_000_000):
        epoch = Planner(size, lengths, Budget(64), WindowRule(requests=4)).epoch(0, 8)
        tracemalloc.start()
        for _ in zip(range(400), epoch, strict=False):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 2 * min(peaks)
    assert max(peaks) < 200_000


def test_repeated_ids_are_found() -> None:
    assert repeated_places(["a", 1, "b", "1", "a", 1, "a"]) == {4: 0, 5: 1, 6: 0}
    assert repeated_places([-1, -2]) == {}, "two ids with the same hash are not the same"
    assert repeated_places(range(10)) == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WindowRule(requests=0), "requests_per_update=0 is not allowed"),
        (lambda: WindowRule(tokens=-1), "tokens_per_update=-1 is not allowed"),
        (lambda: WindowRule(1, 1), "requests_per_update=1 and tokens_per_update=1 are not allowed together"),
        (lambda: BadRequestPolicy("cut"), "on_long_text='cut' is not allowed: use one of error, truncate,"),
        (lambda: BadRequestPolicy(on_empty_request="truncate"), "on_empty_request='truncate' is not allowed"),
        (lambda: BadRequestPolicy(on_untrainable_request=""), "on_untrainable_request='' is not allowed"),
    ],
)
def test_bad_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_planning_does_not_import_torch() -> None:
    code = "import sys, requestzero.planning; assert not {'torch', 'numpy'} & set(sys.modules)"
    run_code(code)
