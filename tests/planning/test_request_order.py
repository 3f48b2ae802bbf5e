"""The order of an epoch: a permutation that needs no list."""

from __future__ import annotations

import itertools

import pytest

from requestzero.planning import RequestOrder


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1000])
def test_every_request_comes_once(size: int) -> None:
    for seed, epoch in itertools.product(range(3), range(2)):
        order = RequestOrder(size, seed, epoch)
        assert len(order) == size
        assert sorted(order[place] for place in range(size)) == list(range(size))


def test_the_order_follows_from_seed_and_epoch() -> None:
    orders = {tuple(RequestOrder(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert list(RequestOrder(50, 1, 2)) == list(RequestOrder(50, 1, 2))
    assert list(RequestOrder(50, 1, 2, shuffle=False)) == list(range(50))


def test_places_are_spread_evenly() -> None:
    """Over 2,000 epochs, each of 8 requests is at each place about 250 times (six standard deviations: 89)."""
    counts = [[0] * 8 for _ in range(8)]
    for epoch in range(2000):
        for place, index in enumerate(RequestOrder(8, 0, epoch)):
            counts[place][index] += 1
    assert all(abs(count - 250) < 90 for row in counts for count in row)


@pytest.mark.parametrize("place", [-1, 5])
def test_a_place_beyond_the_order_is_refused(place: int) -> None:
    with pytest.raises(IndexError, match=rf"There is no place {place} in an order of 5 requests"):
        RequestOrder(5, 0, 0)[place]
