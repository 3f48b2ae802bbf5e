"""Ranks that run different numbers of micro-batches in a window, which they reduce once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from requestzero import PlannedLoader
from requestzero.config.reduction_time import reduction_time
from requestzero.errors import RankDisagreementError
from support.engines import build
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import applied_by
from support.windows import ALL, Micro, backward, values

OPTIONS = {"requestzero": {"rank_dependent_micro_batches": True, "reduce_gradients_at": "window"}}
WINDOWS = [(3, 1), (1, 2), (4, 3)]
"""Micro-batches of each window, by rank."""


def expected_sum(window: int) -> list[torch.Tensor]:
    """The gradient of every layer over all micro-batches of all ranks, divided by the number of ranks, in fp64."""
    from support.windows import ExactLayers

    model = ExactLayers().double()
    for rank, count in enumerate(WINDOWS[window]):
        for number in range(count):
            x, w = values(10 * window + number, rank, 2)
            (model(x.double(), w.double(), ALL) / 2).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def unequal(setup: Setup, announced: bool) -> bool:
    """Apply every window exactly; requests have two micro-batches and are as many as needed."""
    import deepspeed.comm as dist

    engine: Any = build(setup)
    for window, counts in enumerate(WINDOWS):
        own = counts[dist.get_rank()]
        for number in range(own):
            last = number == own - 1
            engine.set_gradient_accumulation_boundary(number % 2 == 1 or last, window_end=last and announced)
            backward(engine, Micro(ALL, 10 * window + number), mark=False)
        for got, wanted in zip(applied_by(engine), expected_sum(window), strict=True):
            assert torch.equal(got, wanted), (window, got, wanted)
    engine.destroy()
    return True


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize(("stage", "offload"), [(1, False), (1, True), (2, False)])
def test_ranks_run_different_numbers(two_ranks: RankGroup, stage: int, offload: bool, announced: bool) -> None:
    setup = Setup(stage, offload, "bf16", "fp32", config=OPTIONS)
    assert two_ranks.run(unequal, setup, announced) == [True, True]


def leaves_early(setup: Setup) -> str:
    """The error where rank 1 has one window less."""
    import deepspeed.comm as dist

    engine: Any = build(setup)
    try:
        with engine.data_pass():
            for window in range(2 - dist.get_rank()):
                backward(engine, Micro(ALL, window))
                engine.step()
    except RankDisagreementError as error:
        return str(error)
    finally:
        engine.destroy()
    return "none"


def test_windows_are_still_agreed_on(two_ranks: RankGroup) -> None:
    (message,) = set(two_ranks.run(leaves_early, Setup(1, config=OPTIONS)))
    assert "rank 0: steps after micro-batch 1" in message
    assert "rank 1: has no more data" in message


def weighted(setup: Setup) -> list[float]:
    """Updates by ``"token"`` with a weight of 1 each: the mean over all micro-batches of all ranks."""
    import deepspeed.comm as dist

    engine: Any = build(setup)
    for number in range((3, 1)[dist.get_rank()]):
        engine.add_weight(1)
        backward(engine, Micro(ALL, number))
    applied = applied_by(engine, normalization="token")
    engine.destroy()
    mean = [each * 2 / 4 for each in expected_sum(0)]
    return [(got - wanted).abs().max().item() for got, wanted in zip(applied, mean, strict=True)]


def test_weights_make_the_mean(two_ranks: RankGroup) -> None:
    for errors in two_ranks.run(weighted, Setup(1, config=OPTIONS)):
        assert max(errors) == 0.0


def mean_refused(setup: Setup) -> bool:
    engine: Any = build(setup)
    backward(engine, Micro(ALL, 0))
    with pytest.raises(ValueError, match="different numbers of micro-batches"):
        engine.step(normalization="mean")
    engine.destroy()
    return True


def test_there_is_no_mean_over_micro_batches(one_rank: RankGroup) -> None:
    assert one_rank.run(mean_refused, Setup(1, config=OPTIONS)) == [True]


@pytest.mark.parametrize(
    ("stage", "wanted", "policy"),
    [(2, None, "skip"), (2, "auto", "skip"), (1, "request", "skip"), (1, None, "raise")],
)
def test_something_reduces_before_the_windows_end(stage: int, wanted: str | None, policy: str) -> None:
    with pytest.raises(ValueError, match="rank_dependent_micro_batches=true needs"):
        reduction_time(stage, wanted, policy, unequal=True)


# --- the planner ----------------------------------------------------------------------------------------------------

REQUESTS = [[[1] * length for length in lengths] for lengths in ([5, 4, 3], [6], [2], [7, 7, 2, 1], [3])]


def loader(rank: int, **options: Any) -> PlannedLoader:
    return PlannedLoader(
        REQUESTS,
        collate=list,
        tokens_per_micro_batch=8,
        weight=lambda texts: float(sum(map(len, texts))),
        filler=lambda texts: [],
        shuffle=False,
        rank=rank,
        world_size=3,
        **options,
    )


def test_the_planner_needs_no_fillers() -> None:
    """Every text once, no fillers but one where a rank would have nothing, and as many windows on every rank."""
    by_rank = [list(loader(rank, requests_per_update=2, equal_micro_batches=False)) for rank in range(3)]
    texts = sorted(len(text) for micros in by_rank for micro in micros for text in micro.inputs)
    assert texts == sorted(len(text) for request in REQUESTS for text in request)
    assert len({len(micros) for micros in by_rank}) > 1, "different numbers"
    for micros in by_rank:
        assert sum(bool(micro.window_end) for micro in micros) == 2
        for before, after in pairwise(micros):
            assert before.request_end == (before.request_id != after.request_id or bool(before.window_end))
    fillers = sum(not micro.inputs for micros in by_rank for micro in micros)
    equal = [list(loader(rank, requests_per_update=2)) for rank in range(3)]
    assert fillers < sum(not micro.inputs for micros in equal for micro in micros)


def test_a_rank_without_texts_runs_one_filler() -> None:
    by_rank = [list(loader(rank, requests_per_update=1, equal_micro_batches=False)) for rank in range(3)]
    for micros in by_rank:
        assert sum(bool(micro.window_end) for micro in micros) == len(REQUESTS)
    for number in range(len(REQUESTS)):
        of_window = [[m for m in micros if m.request_id == number] for micros in by_rank]
        assert all(of_window)
        assert all(len(micros) == 1 for micros in of_window if not micros[0].inputs)


def test_the_planner_has_to_mark_windows() -> None:
    with pytest.raises(ValueError, match="needs windows whose ends it marks"):
        loader(0, equal_micro_batches=False)
    with pytest.raises(TypeError, match="has no length"):
        len(loader(0, requests_per_update=2, equal_micro_batches=False))
