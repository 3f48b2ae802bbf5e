"""ZeRO 3: random windows over a grid of configurations, against plain PyTorch, without tolerance."""

from __future__ import annotations

import zlib
from itertools import combinations, cycle
from typing import Any

import pytest

from requestzero.probe.windows import OUTS, random_windows
from support.pairwise import Row, pairs_of, pairwise
from support.ranks import RankGroup
from support.setup import Setup
from support.stage_3 import GATHERED, PLACES, Model, Wrong, paired, setup_of, wrong_windows
from support.windows import ALL, Micro, Window

PARAMETERS = 2 * len(OUTS)
WINDOWS = 10
"""Per configuration on two ranks, of one or two requests each."""
FEWER = 4
"""Per configuration on other numbers of ranks."""


def static_scale(scale: float) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "loss_scale": scale}}


# Every value of every factor: fields of a Setup, of a Model, or options of zero_optimization. The first are defaults.
FACTORS: dict[str, list[dict[str, Any]]] = {
    "place": list(PLACES.values()),
    "dtypes": [
        {"model": "fp32", "accum": "fp32"},
        {"model": "bf16", "accum": "bf16"},
        {"model": "bf16", "accum": "fp32"},
        {"model": "fp32", "accum": "bf16"},
        {"model": "fp16", "accum": "fp16", "config": static_scale(1.0)},
        {"model": "fp16", "accum": "fp32", "config": static_scale(16.0)},
    ],
    "checkpointing": [{}, {"checkpointing": "reentrant"}, {"checkpointing": "nonreentrant"}],
    "persistence": [{}, {"zero": GATHERED}, {"zero": {"stage3_param_persistence_threshold": 16}}],
    "buckets": [{}, {"zero": {"reduce_bucket_size": 8}}, {"zero": {"reduce_bucket_size": 24}}],
    "sub-groups": [{}, {"zero": {"sub_group_size": 1}}, {"zero": {"sub_group_size": 20}}],
    "groups": [{}, {"groups": 3}],
    "managed": [{}, {"managed": False}],
    "used": [{}, {"twice": True}],
    "sharded": [{}, {"sharded": True}],
    "reduce_scatter": [{}, {"zero": {"reduce_scatter": False}}],
    "contiguous": [{}, {"zero": {"contiguous_gradients": False}}],
    "overlap": [{}, {"zero": {"overlap_comm": True}}],
    "prefetch": [{}, {"zero": {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}}],
}
MODEL_FIELDS = {"twice", "sharded"}


def configuration(row: Row) -> tuple[Setup, Model]:
    fields: dict[str, Any] = {}
    zero: dict[str, Any] = {}
    for factor, index in row.items():
        value = dict(FACTORS[factor][index])
        zero |= value.pop("zero", {})
        fields |= value
    model = Model(**{name: fields.pop(name) for name in MODEL_FIELDS & fields.keys()})
    return Setup(stage=3, zero=zero, **fields), model


ROWS = pairwise(FACTORS, "stage 3")


def name_of(row: Row) -> str:
    return "-".join(f"{factor}{index}" for factor, index in row.items() if index) or "default"


def windows_of(row: Row, count: int = WINDOWS) -> list[Window]:
    return [paired(window) for window in random_windows(count, 2, zlib.crc32(name_of(row).encode()))]


def assert_nothing_wrong(ranks: RankGroup, row: Row, count: int = WINDOWS) -> None:
    setup, model = configuration(row)
    for wrong in ranks.run(wrong_windows, setup, windows_of(row, count), model):
        assert wrong == Wrong(compared=count * PARAMETERS), f"{setup}, {model}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_every_update_is_the_exact_sum(two_ranks: RankGroup, row: Row) -> None:
    assert_nothing_wrong(two_ranks, row)


@pytest.mark.parametrize("row", ROWS[::6], ids=name_of)
def test_on_one_rank(one_rank: RankGroup, row: Row) -> None:
    assert_nothing_wrong(one_rank, row, FEWER)


@pytest.mark.parametrize("row", ROWS[3::6], ids=name_of)
def test_on_three_ranks(three_ranks: RankGroup, row: Row) -> None:
    assert_nothing_wrong(three_ranks, row, FEWER)


def test_enough_is_compared() -> None:
    """Every pair of values, and at least 3,000 parameter updates in each run of the tests."""
    covered = set().union(*map(pairs_of, ROWS))
    levels = [len(values) for values in FACTORS.values()]
    assert len(covered) == sum(a * b for a, b in combinations(levels, 2))
    assert (len(ROWS) * WINDOWS + (len(ROWS[::6]) + len(ROWS[3::6])) * FEWER) * PARAMETERS >= 3000


@pytest.mark.slow
@pytest.mark.parametrize("managed", [True, False])
def test_stock_deepspeed_fails_on_such_windows(two_ranks: RankGroup, managed: bool) -> None:
    """DeepSpeed's own optimizer is wrong in every place and dtype, in updates and in norms."""
    windows = [paired(window) for window in random_windows(6, 4, 1)]
    for place, dtypes in zip(PLACES, cycle(FACTORS["dtypes"][:3])):
        setup = setup_of(place, managed=managed, **dtypes)
        wrong = two_ranks.run(wrong_windows, setup, windows, Model(), False)[0]
        assert min(wrong.updates, 2 * wrong.norms) >= 6, wrong


@pytest.mark.slow
@pytest.mark.parametrize("place", ["device", "optimizer"])
def test_stock_deepspeed_fails_where_parameters_are_used_twice(two_ranks: RankGroup, place: str) -> None:
    """In two reentrant segments, in a bucket that does not hold all of them: every update, of parameters that take
    part in every micro-batch.
    """
    seeds = (12, 14, 16, 18)  # no gradient is zero
    windows = [[Micro(2 * ALL, seed, False), Micro(2 * ALL, seed + 1)] for seed in seeds]
    setup = setup_of(place, checkpointing="reentrant", zero={"reduce_bucket_size": 24})
    whole = 4 * PARAMETERS
    assert two_ranks.run(wrong_windows, setup, windows, Model(twice=True))[0] == Wrong(compared=whole)
    assert two_ranks.run(wrong_windows, setup, windows, Model(twice=True), False)[0].updates == whole
