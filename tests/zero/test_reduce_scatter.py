"""The reduce-scatter of buckets: its sums, its bytes, and what is all-reduced instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from requestzero.probe.counters import Collectives
from requestzero.probe.models import Chain
from requestzero.zero.stage_1_and_2 import reduce_scatter
from requestzero.zero.stage_1_and_2.layout import Share
from requestzero.zero.stage_1_and_2.scatter_plan import Part, plan_scatter
from support.engines import build
from support.grid import every_sum
from support.ranks import RankGroup
from support.setup import Setup

SCATTERS = ["exchange", "scatter_uneven", "scatter_padded"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


# --- the collectives ------------------------------------------------------------------------------------------------


def scattered(names: list[str], dtypes: list[torch.dtype], sizes: list[int]) -> list[tuple[str, torch.dtype, bool]]:
    """Of every function and dtype, whether this rank gets its share of the sum of ``rank + 1`` times 0, 1, 2, ..."""
    from deepspeed import comm as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    group, found = dist.get_world_group(), []
    for name in names:
        for dtype in dtypes:
            values = torch.arange(sum(sizes), dtype=dtype) * (rank + 1)
            expected = torch.arange(sum(sizes), dtype=dtype).split(sizes)[rank] * (ranks * (ranks + 1) // 2)
            share = getattr(reduce_scatter, name)(dist, values, sizes, rank, group)
            found.append((name, dtype, share.dtype == dtype and torch.equal(share, expected)))
    return found


@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 8, 2], [0, 5, 0], [0, 0, 7]], ids=str)
def test_every_rank_gets_its_share_of_the_sum(three_ranks: RankGroup, sizes: list[int]) -> None:
    for found in three_ranks.run(scattered, SCATTERS, DTYPES, sizes):
        assert len(found) == len(SCATTERS) * len(DTYPES)
        assert [each for each in found if not each[2]] == []


def chosen(devices: list[str]) -> list[str]:
    from deepspeed import comm as dist

    return [reduce_scatter.choose_scatter(dist.get_world_group(), torch.device(each)).__name__ for each in devices]


def test_the_backend_decides(two_ranks: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert two_ranks.run(chosen, ["cpu"]) == [["exchange"]] * 2
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda group: "cpu:gloo,cuda:nccl,xpu:xccl")
    choose = reduce_scatter.choose_scatter
    names = [choose(None, torch.device(each)).__name__ for each in ("cpu", "cuda:3", "xpu", "meta")]
    assert names == ["exchange", "scatter_uneven", "scatter_padded", "scatter_padded"]


# --- the plan -------------------------------------------------------------------------------------------------------


@st.composite
def buckets(draw: st.DrawFn) -> tuple[list[Part], dict[int, Sequence[Share]], int]:
    """Parameters of any size, laid one after another into partitions, in any order in a bucket, some left out."""
    ranks, sizes = draw(st.integers(1, 4)), draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    partition = -(-sum(sizes) // ranks)
    shares: dict[int, Sequence[Share]] = {}
    offset = 0
    for number, numel in enumerate(sizes):
        ends = [offset, *(r * partition for r in range(ranks) if offset < r * partition < offset + numel)]
        cuts = zip(ends, [*ends[1:], offset + numel], strict=True)
        shares[number] = [Share(begin // partition, begin - offset, end - begin) for begin, end in cuts]
        offset += numel
    parts, start = [], 0
    for number in draw(st.permutations(range(len(sizes)))):
        if draw(st.booleans()):
            parts.append(Part(number, 0, 0, start, sizes[number]))
            start += sizes[number]
    return parts, shares, ranks


@given(buckets())
def test_every_element_has_one_owner_who_finds_it(drawn: tuple[list[Part], dict[int, Sequence[Share]], int]) -> None:
    parts, shares, ranks = drawn
    numel = sum(part.numel for part in parts)
    bucket = torch.arange(float(numel))
    owner_of = {
        (n, share.start + i): share.rank for n, cut in shares.items() for share in cut for i in range(share.numel)
    }
    seen = []
    for rank in range(ranks):
        plan = plan_scatter(parts, shares, rank, ranks)
        assert sum(plan.sizes) == numel
        own = (plan.arranged(bucket) if numel else bucket).split(list(plan.sizes))[rank]
        for part in plan.own:
            (whole,) = (each for each in parts if each.param_id == part.param_id)
            for i in range(part.numel):
                assert owner_of[part.param_id, part.first + i] == rank
                assert own[part.start + i] == whole.start + part.first + i
            seen += [(part.param_id, part.first + i) for i in range(part.numel)]
    assert sorted(seen) == sorted((part.param_id, i) for part in parts for i in range(part.numel))


def test_a_bucket_in_the_order_of_partitions_is_not_copied() -> None:
    shares = {0: [Share(0, 0, 3)], 1: [Share(0, 0, 1), Share(1, 1, 2)], 2: [Share(1, 0, 2)]}
    bucket = torch.arange(8.0)
    in_order = [Part(2, 0, 0, 6, 2), Part(1, 0, 0, 3, 3), Part(0, 0, 0, 0, 3)]
    plan = plan_scatter(in_order, shares, 1, 2)
    assert plan.arranged(bucket) is bucket
    assert plan.own == [Part(1, 0, 1, 0, 2), Part(2, 0, 0, 2, 2)]
    swapped = [Part(2, 0, 0, 0, 2), Part(1, 0, 0, 2, 3), Part(0, 0, 0, 5, 3)]
    assert plan_scatter(swapped, shares, 1, 2).arranged(bucket).tolist() == [2, 5, 6, 7, 0, 1, 3, 4]


# --- collectives of a window ----------------------------------------------------------------------------------------


def collectives(setup: Setup, requestzero: bool, smallest: int = 256) -> dict[str, tuple[int, int]]:
    """Number and bytes of the large collectives of one backward that ends its request, by name."""
    engine: Any = build(setup, requestzero, model=Chain(16, width=8))
    x = torch.ones(1, 8, dtype=next(engine.module.parameters()).dtype, device=engine.device)
    engine.set_gradient_accumulation_boundary(True)
    loss = engine(x)
    with Collectives(smallest) as seen:
        engine.backward(loss)
    engine.step()
    engine.destroy()
    return {name: (count, seen.bytes[name]) for name, count in seen.counts.items()}


@pytest.mark.parametrize("stage", [1, 2])
@every_sum
def test_a_bucket_is_exchanged_and_not_all_reduced(two_ranks: RankGroup, stage: int, model: str, accum: str) -> None:
    """Half of what DeepSpeed's all-reduce of the same bytes moves."""
    setup = Setup(stage, model=model, accum=accum)
    at_request = replace(setup, at="request" if stage == 1 else setup.at)
    elements = sum(each.numel() for each in Chain(16, width=8).parameters())
    in_fp32 = model == "fp32" or (stage == 1 and accum == "fp32")
    ours = two_ranks.run(collectives, at_request, True)
    assert ours == [{"all-to-all": (1, elements * (4 if in_fp32 else 2))}] * 2
    if (stage, model, accum) != (1, "bf16", "fp32"):  # DeepSpeed's BF16_Optimizer
        assert two_ranks.run(collectives, setup, False)[0] == {"all-reduce": ours[0]["all-to-all"]}


@pytest.mark.parametrize(
    ("zero", "name"),
    [({"reduce_scatter": False}, "all-reduce"), ({"use_multi_rank_bucket_allreduce": False}, "reduce")],
    ids=["reduce_scatter", "owners"],
)
def test_other_options_keep_their_collective(two_ranks: RankGroup, zero: dict[str, Any], name: str) -> None:
    assert set(two_ranks.run(collectives, Setup(zero=zero), True)[0]) == {name}


def test_unbalanced_buckets_are_all_reduced_by_gloo(three_ranks: RankGroup) -> None:
    """Small buckets of one owner: an exchange would bring it twice the bucket, an all-reduce 4/3 of it."""
    small = Setup(zero={"reduce_bucket_size": 64})
    (seen,) = {str(each) for each in three_ranks.run(collectives, small, True)}
    assert "all-reduce" in seen
    at_once = {"reduce_bucket_size": 256, "overlap_comm": False}
    assert set(three_ranks.run(collectives, Setup(stage=1, zero=at_once, at="request"), True)[0]) == {"all-to-all"}, (
        "balanced"
    )
