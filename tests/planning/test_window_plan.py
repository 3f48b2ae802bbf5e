"""Windows of micro-batches: nothing lost, equal counts, within the budget, few fillers, balanced."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requestzero.planning import Budget, PlanStatistics, WindowPlan, plan_window
from requestzero.planning.bad_requests import UsableRequest
from requestzero.planning.naive import naive_micro_batches
from requestzero.planning.packed_bins import packed_bins
from requestzero.planning.padded_bins import padded_bins
from requestzero.planning.statistics import Cost
from requestzero.planning.window_plan import naive_cost, planned_cost


def quadratic(length: int) -> float:
    return length + length * length / 16


WINDOWS = st.lists(st.lists(st.integers(1, 32), min_size=1, max_size=40), min_size=1, max_size=5)
BUDGETS = st.builds(
    Budget,
    tokens=st.integers(32, 100),
    sequences=st.none() | st.integers(1, 6),
    layout=st.sampled_from(["padded", "packed"]),
    cost=st.none() | st.just(quadratic),
)
WORLD_SIZES = st.integers(1, 5)


def plan(requests: list[list[int]], budget: Budget, world_size: int, **options: Any) -> WindowPlan:
    items = [(100 + n, UsableRequest(list(range(len(one))), one)) for n, one in enumerate(requests)]
    return plan_window(items, budget, world_size, **options)


@settings(max_examples=300, deadline=None)
@given(WINDOWS, BUDGETS, WORLD_SIZES)
def test_every_sequence_once_in_equal_numbers_within_the_budget(
    requests: list[list[int]], budget: Budget, world_size: int
) -> None:
    window = plan(requests, budget, world_size)
    ranks = [list(window.micro_batches(rank)) for rank in range(world_size)]
    marks = [[(b.request, b.micro_batches, b.request_end, b.window_end) for b in rank] for rank in ranks]
    assert all(other == marks[0] for other in marks)
    assert {len(rank) for rank in ranks} == {len(window)}
    assert [request for request, _, end, _ in marks[0] if end] == [100 + n for n in range(len(requests))]
    assert [end for *_, end in marks[0]] == [False] * (len(window) - 1) + [True]
    assert all(count == n for n, (request, n, _, _) in enumerate(marks[0]) for count in [n])
    real = [b for rank in ranks for b in rank if not b.is_filler]
    seen = Counter((b.request - 100, position) for b in real for position in b.positions)
    assert seen == Counter((n, position) for n, one in enumerate(requests) for position in range(len(one)))
    assert all(budget.allows([requests[b.request - 100][p] for p in b.positions]) for b in real)
    for number, one in enumerate(requests):
        per_rank = window.requests[number].bins.micro_batches
        assert [count for request, count, *_ in marks[0] if request == 100 + number] == [per_rank] * per_rank
        fillers = [b for rank in ranks for b in rank if b.is_filler and b.request == 100 + number]
        assert len(fillers) == max(0, world_size * per_rank - len(one)), "no more than the arithmetic requires"
        assert all([one[p] for p in b.positions] == [min(one)] for b in fillers)


def fewest_padded(lengths: list[int], budget: Budget) -> int:
    """By trying all cuts of the descending order, in which some best solution lies."""
    best = [0, *[math.inf] * len(lengths)]
    for stop in range(1, len(lengths) + 1):
        for start in range(stop):
            if budget.allows(lengths[start:stop]):
                best[stop] = min(best[stop], best[start] + 1)
    return int(best[-1])


def fewest_packed(lengths: list[int], budget: Budget) -> int:
    """By exhaustive search."""

    def search(place: int, bins: list[list[int]]) -> int:
        if place == len(lengths):
            return len(bins)
        found = [search(place + 1, [*bins, [lengths[place]]])]
        for number, one in enumerate(bins):
            if budget.allows([*one, lengths[place]]) and bins.index(one) == number:
                found.append(search(place + 1, [*bins[:number], [*one, lengths[place]], *bins[number + 1 :]]))
        return min(found)

    return search(0, [])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=6), BUDGETS, WORLD_SIZES)
def test_no_rank_runs_more_micro_batches_than_it_must(lengths: list[int], budget: Budget, world_size: int) -> None:
    """Padded: never. Packed: within the bound of best fit decreasing, since the fewest cannot be found fast."""
    descending = sorted(lengths, reverse=True)
    padded = budget.layout == "padded"
    micro_batches, bins = (padded_bins if padded else packed_bins)(descending, budget, world_size)
    fewest = (fewest_padded if padded else fewest_packed)(descending, budget)
    most = fewest if padded else 2 * fewest if budget.sequences else fewest * 11 / 9 + 1
    assert math.ceil(fewest / world_size) <= micro_batches <= math.ceil(most / world_size)
    assert len(bins) == min(len(lengths), world_size * micro_batches)


def test_a_full_budget_is_met_by_best_fit() -> None:
    """Lightest first puts 6 + 5 = 11 together; four micro-batches of exactly 10 exist."""
    micro_batches, bins = packed_bins([6, 6, 5, 5, 4, 4, 3, 3, 2, 2], Budget(10, layout="packed"), 2)
    assert micro_batches == 2
    assert sorted(place for one in bins for place in one) == list(range(10))
    lengths = [6, 6, 5, 5, 4, 4, 3, 3, 2, 2]
    assert [sum(lengths[place] for place in one) for one in bins] == [10] * 4


def log_normal(rng: random.Random, world_size: int, spread: float, budget: int) -> list[list[int]]:
    """A window of 1 to 8 requests, each with 8 texts per rank on average."""
    sizes = [max(1, int(rng.lognormvariate(math.log(8 * world_size), 0.8))) for _ in range(rng.choice([1, 2, 4, 8]))]
    return [[min(budget, max(3, int(rng.lognormvariate(5, spread)))) for _ in range(size)] for size in sizes]


@pytest.mark.parametrize("world_size", [2, 4, 16])
@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_the_busiest_rank_carries_at_most_5_percent_more(world_size: int, spread: float) -> None:
    """Windows of 8 sequences per rank and micro-batch, unless one text alone is more than half of a rank's mean."""
    rng, budget, checked, totals = random.Random(7), Budget(8192, layout="packed"), 0, PlanStatistics()
    for _ in range(120):
        requests = log_normal(rng, world_size, spread, budget.tokens)
        window = plan(requests, budget, world_size)
        cost = planned_cost(window, budget, world_size)
        enough = sum(map(len, requests)) >= 8 * world_size * len(window)
        if enough and max(map(max, requests)) < 0.5 * cost.mean:
            checked += 1
            totals += PlanStatistics(planned=cost, naive=naive_cost(window, budget, world_size, None))
            assert cost.imbalance <= 0.05, requests
    assert checked >= 25
    assert totals.naive.imbalance > 5 * totals.planned.imbalance


def test_what_a_look_at_a_few_sequences_leaves_uneven_is_searched_in_full() -> None:
    requests, budget = log_normal(random.Random(108), 32, 1.0, 8192), Budget(8192, layout="packed")
    with mock.patch("requestzero.planning.rebalance._TARGETS_IN_FULL", 0):
        assert planned_cost(plan(requests, budget, 32), budget, 32).imbalance > 0.05
    assert planned_cost(plan(requests, budget, 32), budget, 32).imbalance <= 0.05


def fewest_rows_limit(lengths: list[int], micro_batches: int) -> int:
    """The smallest cost of the costliest padded micro-batch: filled up to a limit, longest rows first."""
    lengths = sorted(lengths, reverse=True)

    def needed(limit: int) -> int:
        place = count = 0
        while place < len(lengths):
            place, count = place + limit // lengths[place], count + 1
        return count

    return next(limit for limit in range(lengths[0], sum(lengths) + 1) if needed(limit) <= micro_batches)


def test_padded_micro_batches_are_as_even_as_whole_rows_allow() -> None:
    rng, budget = random.Random(3), Budget(8192, layout="padded")
    for _ in range(40):
        lengths = [int(rng.lognormvariate(4, 0.5)) + 1 for _ in range(rng.randint(32, 120))]
        window = plan([lengths], budget, 4)
        assert len(window) == 1
        assert planned_cost(window, budget, 4).busiest <= 1.01 * fewest_rows_limit(lengths, 4)


@settings(max_examples=200, deadline=None)
@given(WINDOWS, BUDGETS, WORLD_SIZES)
def test_moving_sequences_never_makes_the_busiest_rank_busier(
    requests: list[list[int]], budget: Budget, world_size: int
) -> None:
    moved = planned_cost(plan(requests, budget, world_size), budget, world_size)
    with mock.patch("requestzero.planning.window_plan.rebalance", lambda cut, shares, loads, budget: loads):
        before = planned_cost(plan(requests, budget, world_size), budget, world_size)
    assert moved.busiest <= before.busiest + 1e-9
    assert (moved.micro_batches, moved.fillers) == (before.micro_batches, before.fillers)


def test_the_cost_decides_what_is_balanced() -> None:
    requests = [[48, 16, 16, *[8] * 4]]
    by_tokens = Budget(512, layout="packed")
    by_squares = Budget(512, layout="packed", cost=lambda length: length**2)
    for budget, sizes in ((by_tokens, [2, 5]), (by_squares, [1, 6])):
        window = plan(requests, budget, 2)
        assert sorted(len(next(window.micro_batches(rank)).positions) for rank in (0, 1)) == sizes


def test_light_requests_make_up_for_a_heavy_one() -> None:
    """One text of 90 tokens leaves a rank idle; in the other requests of its window that rank gets more."""
    budget = Budget(1000, layout="packed")
    window = plan([[90], [10] * 20, [10] * 20], budget, 2)
    assert planned_cost(window, budget, 2).imbalance <= 0.05
    assert planned_cost(plan([[90]], budget, 2), budget, 2).imbalance == 1.0


def test_a_text_beyond_the_budget_is_alone() -> None:
    for layout in ("padded", "packed"):
        window = plan([[50, 9, 4, 4, 3]], Budget(10, layout=layout), 2)
        shares = [b.positions for rank in (0, 1) for b in window.micro_batches(rank) if not b.is_filler]
        assert (0,) in shares
        assert sum(map(len, shares)) == 5


def test_naive_splitting_is_in_order_and_padded() -> None:
    lengths = [5, 1, 2, 7, 3]
    assert list(naive_micro_batches(lengths, 2, 1)) == [(0, [5]), (1, [1]), (0, [2]), (1, [7]), (0, [3])]
    assert list(naive_micro_batches(lengths, 2, 2)) == [(0, [5, 2]), (1, [1, 7]), (0, [3])]
    budget = Budget(100, layout="padded")
    cost = naive_cost(plan([lengths], budget, 2), budget, 2, sequences=2)
    assert cost == Cost(computed=10 + 14 + 3, micro_batches=4, fillers=1, busiest=14.0, mean=13.5)
    assert cost.padding(sum(lengths)) == pytest.approx(1 - 18 / 27)
    assert cost.imbalance == pytest.approx(14 / 13.5 - 1)


def test_statistics_add_up_and_survive_a_state_dict() -> None:
    one = PlanStatistics(windows=1, tokens=3, planned=Cost(computed=5, busiest=2.0, mean=1.0))
    both = one + one
    assert (both.windows, both.tokens, both.planned.computed, both.planned.busiest) == (2, 6, 10, 4.0)
    assert PlanStatistics.from_state(both.state()) == both
    assert (PlanStatistics().planned.imbalance, PlanStatistics().planned.padding(0)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 0}, "tokens_per_micro_batch=0 is not allowed: give a whole number above 0"),
        ({"tokens": 1.5}, r"tokens_per_micro_batch=1\.5 is not allowed"),
        ({"tokens": 1, "sequences": True}, "max_sequences=True is not allowed"),
        ({"tokens": 1, "layout": "flat"}, "layout='flat' is not allowed: use one of padded, packed"),
    ],
)
def test_bad_budgets_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Budget(**arguments)
