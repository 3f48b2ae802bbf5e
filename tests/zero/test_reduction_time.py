"""When gradients are reduced: collectives and bytes of a window in every mode, and what happens in between."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from requestzero.probe.counters import Collectives
from requestzero.probe.models import Chain
from support.engines import build, masters
from support.logs import logged_by
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import applied_by, assert_sums
from support.windows import ALL, Micro, backward, reference, wrong_updates

REQUESTS, MICRO_BATCHES = 4, 4
ELEMENTS = 16 * 8 * 8
SOME = (True, False, True, False, True)
WINDOW = [Micro(ALL, 1, False), Micro(SOME, 2), Micro(SOME, 3), Micro(ALL, 4, False), Micro(ALL, 5)]


# --- collectives and bytes ------------------------------------------------------------------------------------------


def collectives_of_windows(setup: Setup, requestzero: bool, announced: bool = False) -> dict[str, list[Counter[str]]]:
    """Numbers and bytes of the large collectives for gradients, of the second of two windows: in backwards, in steps.

    DeepSpeed's all-gather of the weights is left out.
    """
    engine: Any = build(setup, requestzero, model=Chain(16, width=8))
    x = torch.ones(1, 8, dtype=next(engine.module.parameters()).dtype, device=engine.device)
    for _ in range(2):
        in_backward, in_step = Collectives(256), Collectives(256)
        with in_backward:
            for request in range(REQUESTS):
                if announced:
                    engine.begin_request(micro_batches=MICRO_BATCHES, window_end=request == REQUESTS - 1)
                for micro_batch in range(MICRO_BATCHES):
                    if setup.managed:
                        engine.set_gradient_accumulation_boundary(micro_batch == MICRO_BATCHES - 1)
                    engine.backward(engine(x))
        with in_step:
            engine.step()
    engine.destroy()
    for each in (in_backward, in_step):
        each.counts.pop("all-gather", None)
        each.bytes.pop("all-gather", None)
    return {"backward": [in_backward.counts, in_backward.bytes], "step": [in_step.counts, in_step.bytes]}


def moved(seen: dict[str, list[Counter[str]]]) -> float:
    """Bytes that a rank of two sends: all of what is all-reduced, half of what is exchanged."""
    sizes = seen["backward"][1] + seen["step"][1]
    return sizes["all-reduce"] + sizes["all-to-all"] / 2


RAISE = {"bf16": {"enabled": True, "check_grad_overflow": True}, "overflow": {"on_overflow": "raise"}}
MODES: list[tuple[Setup, int, int]] = [  # how often the model is exchanged, and its bytes per element
    (Setup(1), 1, 4),
    (Setup(1, at="auto"), 1, 4),
    (Setup(1, at="window"), 1, 4),
    (Setup(1, at="request"), REQUESTS, 4),
    (Setup(1, managed=False), 1, 4),
    (Setup(1, model="bf16", accum="bf16"), 1, 2),
    (Setup(1, model="bf16", accum="fp32"), 1, 4),
    (Setup(1, offload=True, model="bf16", accum="fp32"), 1, 4),
    (Setup(1, model="bf16", accum="fp32", at="request"), REQUESTS, 4),
    (Setup(1, model="bf16", accum="fp32", config=RAISE), REQUESTS, 4),
    (Setup(1, model="bf16", accum="fp32", config={**RAISE, "overflow": {"on_overflow": "drop_request"}}), REQUESTS, 4),
    (Setup(2), REQUESTS * MICRO_BATCHES, 4),
    (Setup(2, at="backward"), REQUESTS * MICRO_BATCHES, 4),
    (Setup(2, at="request"), REQUESTS, 4),
    (Setup(2, at="window"), 1, 4),
    (Setup(2, at="auto"), 1, 4),
    (Setup(2, model="bf16", accum="fp32"), REQUESTS * MICRO_BATCHES, 2),
    (Setup(2, model="bf16", accum="fp32", at="window"), 1, 4),
    (Setup(2, offload=True, model="bf16", accum="bf16", at="window"), 1, 2),
]


@pytest.mark.parametrize(("setup", "times", "size"), MODES, ids=lambda value: str(value).replace(" ", "_"))
def test_bytes_of_a_window(two_ranks: RankGroup, setup: Setup, times: int, size: int) -> None:
    for seen in two_ranks.run(collectives_of_windows, setup, True):
        sizes = seen["backward"][1] + seen["step"][1]
        assert seen["backward"][0] + seen["step"][0] == {"all-to-all": times}
        assert sizes == {"all-to-all": times * size * ELEMENTS}


@pytest.mark.parametrize(
    ("setup", "times"),
    [(Setup(1), REQUESTS), (Setup(1, managed=False), 1), (Setup(2), 16), (Setup(2, managed=False), 16)],
    ids=str,
)
def test_the_default_moves_less_than_stock(two_ranks: RankGroup, setup: Setup, times: int) -> None:
    stock = two_ranks.run(collectives_of_windows, setup, False)[0]
    assert stock["backward"][0] + stock["step"][0] == {"all-reduce": times}
    ours = two_ranks.run(collectives_of_windows, setup, True)[0]
    assert 0 < moved(ours) <= moved(stock) / 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_an_announced_end_is_reduced_in_its_backward(two_ranks: RankGroup, stage: int, overlap: bool) -> None:
    setup = Setup(stage, at="window", zero={"overlap_comm": overlap, "reduce_bucket_size": 512})
    for announced, part, other in ((True, "backward", "step"), (False, "step", "backward")):
        seen = two_ranks.run(collectives_of_windows, setup, True, announced)[0]
        assert seen[part][0] == {"all-to-all": 2}, "two buckets"
        assert seen[other][0] == {}


def counted_steps(steps: int) -> tuple[list[float], bool]:
    """DeepSpeed's own count of micro-batches; bytes in each backward, and whether only their last one reduces."""
    engine: Any = build(Setup(1, config={"gradient_accumulation_steps": steps}), model=Chain(4, width=8))
    x = torch.ones(1, 8, device=engine.device)
    numbers = []
    for _ in range(2 * steps):
        with Collectives(256) as seen:
            engine.backward(engine(x))
        numbers.append(sum(seen.counts.values()))
        engine.step()
    applied = engine.applied_updates
    engine.destroy()
    return numbers, applied == 2


def test_a_boundary_that_deepspeed_counts_is_the_end_of_a_window(two_ranks: RankGroup) -> None:
    assert two_ranks.run(counted_steps, 3) == [([0, 0, 1, 0, 0, 1], True)] * 2


# --- what waits -----------------------------------------------------------------------------------------------------


def bytes_in_between(setup: Setup) -> list[tuple[int, int, int]]:
    """After every backward, then after the step: bytes of local gradients, of the partition, and publications."""
    engine = build(setup)
    found = []
    for micro in WINDOW:
        backward(engine, micro)
        traffic = engine.partition_traffic.publications
        found.append((engine.local_gradient_bytes, int(engine.grad_partition_bytes), traffic))
    engine.step()
    found.append((engine.local_gradient_bytes, int(engine.grad_partition_bytes), engine.partition_traffic.publications))
    elements = sum(param.numel() for param in engine.module.parameters())
    assert engine.peak_local_gradient_bytes == (0 if setup.at == "backward" else 4 * elements)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("retain", [False, True])
def test_nothing_is_published_before_the_windows_end(two_ranks: RankGroup, stage: int, retain: bool) -> None:
    """With ``retain_gpu_grad_partition_until_step`` in either setting there is no partition to retain before."""
    setup = Setup(stage, offload=True, model="bf16", accum="fp32", at="window", retain=retain)
    for found in two_ranks.run(bytes_in_between, setup):
        *between, after = found
        assert [local > 0 for local, *_ in between] == [True] * len(WINDOW)
        assert [rest for _, *rest in between] == [[0, 0]] * len(WINDOW)
        assert after == (0, 0, 1)


def test_every_backward_leaves_nothing_local(two_ranks: RankGroup) -> None:
    for found in two_ranks.run(bytes_in_between, Setup(2, at="backward")):
        assert [local for local, *_ in found] == [0] * (len(WINDOW) + 1)


def read_in_between(setup: Setup) -> bool:
    """Read the window's sum after every backward; the update is exact all the same."""
    from deepspeed.utils import safe_get_full_grad

    engine: Any = build(setup)
    for number, micro in enumerate(WINDOW, 1):
        backward(engine, micro)
        expected = reference([WINDOW[:number]], 2)[0]
        for param, gradient in zip(engine.module.parameters(), expected, strict=True):
            assert torch.equal(safe_get_full_grad(param).double().cpu(), gradient)
        assert engine.local_gradient_bytes == 0, "reading reduces"
    assert_sums(applied_by(engine), WINDOW)
    engine.destroy()
    return True


def read_in_backwards(setup: Setup) -> bool:
    """Read the sum of a layer when its gradient has come: the others of that backward wait again."""
    from deepspeed.utils import safe_get_full_grad

    engine: Any = build(setup)
    layer, read = list(engine.module.parameters())[2], []
    backward(engine, WINDOW[0])  # before whose end there is no sum to read
    layer.register_post_accumulate_grad_hook(lambda param: read.append(safe_get_full_grad(param).double().cpu()))
    for number, micro in enumerate(WINDOW[1:], 2):
        backward(engine, micro)
        assert torch.equal(read.pop(), reference([WINDOW[:number]], 2)[0][2])
    assert_sums(applied_by(engine), WINDOW)
    engine.destroy()
    return True


def set_in_between(setup: Setup) -> bool:
    """A value that is set takes the place of what waits; the next backward adds to it."""
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    engine: Any = build(setup)
    backward(engine, Micro(ALL, 1))
    for param in engine.module.parameters():
        safe_set_full_grad(param, torch.full_like(param, 2.0, dtype=torch.float32))
    last = Micro(ALL, 2)
    backward(engine, last)
    expected = [each + 2.0 for each in reference([[last]], 2)[0]]
    for param, gradient in zip(engine.module.parameters(), expected, strict=True):
        assert torch.equal(safe_get_full_grad(param).double().cpu(), gradient)
    for got, wanted in zip(applied_by(engine), expected, strict=True):
        assert torch.equal(got, wanted)
    engine.destroy()
    return True


@pytest.mark.parametrize(
    "function", [read_in_between, read_in_backwards, set_in_between], ids=lambda function: function.__name__
)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"model": "bf16", "offload": True}, {"accum": "bf16", "model": "bf16", "offload": True}, {"groups": 3}],
    ids=str,
)
def test_the_sum_is_read_and_set_in_between(
    two_ranks: RankGroup, stage: int, options: dict[str, Any], function: Any
) -> None:
    assert two_ranks.run(function, Setup(stage, at="window", **options)) == [True, True]


def moved_in_between(setup: Setup) -> bool:
    """``offload_states`` in an open window moves what waits, too."""
    engine: Any = build(setup)
    for number, micro in enumerate(WINDOW):
        backward(engine, micro)
        if number == 2:
            engine.offload_states()
            engine.reload_states()
    assert_sums(applied_by(engine), WINDOW)
    engine.destroy()
    return True


@pytest.mark.parametrize("stage", [1, 2])
def test_states_are_moved_in_between(two_ranks: RankGroup, stage: int) -> None:
    assert two_ranks.run(moved_in_between, Setup(stage, at="window")) == [True, True]


def left_in_between(setup: Setup) -> bool:
    """``zero_grad`` and the norm in an open window; blocks that keep gradients local."""
    engine: Any = build(setup)
    backward(engine, Micro(ALL, 9))
    engine.zero_grad()
    assert engine.local_gradient_bytes == 0
    with engine.coalesce_grad_reduction():
        for micro in WINDOW[:2]:
            backward(engine, micro, mark=False)
    for micro in WINDOW[2:]:
        backward(engine, micro)
    norm = torch.stack([each.norm() for each in reference([WINDOW], 2)[0]]).norm()
    assert torch.allclose(engine.pending_norm(1.0).double().cpu(), norm)
    assert engine.local_gradient_bytes == 0
    assert_sums(applied_by(engine), WINDOW)
    engine.destroy()
    return True


@pytest.mark.parametrize("stage", [1, 2])
def test_the_window_may_be_left_in_between(two_ranks: RankGroup, stage: int) -> None:
    assert two_ranks.run(left_in_between, Setup(stage, at="window")) == [True, True]


# --- memory decides -------------------------------------------------------------------------------------------------

PLENTY = 2**60


def free_memory(values: Iterable[int]) -> Any:
    """Let the device's free memory be the next of ``values`` whenever it is asked for."""
    from requestzero.zero.stage_1_and_2.accumulators import retention

    answers = iter(values)
    return patch.object(retention, "free_device_memory", lambda: next(answers))


def windows_while_memory(setup: Setup, free: list[list[int]]) -> tuple[list[list[torch.Tensor]], list[int], list[str]]:
    """Updates of two windows, bytes of local gradients after each backward, and this rank's log."""
    import deepspeed.comm as dist

    seen, updates = [], []
    answers = [PLENTY, *itertools.chain(free[dist.get_rank()], [PLENTY] * 8)]
    with free_memory(answers), logged_by("requestzero", logging.INFO) as log:
        engine: Any = build(setup)
        for _ in range(2):
            for micro in WINDOW:
                backward(engine, micro)
                seen.append(engine.local_gradient_bytes)
            updates.append(applied_by(engine))
        engine.destroy()
    return updates, seen, log


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("model", "overlap"), [("fp32", False), ("bf16", True)])
def test_all_ranks_fall_back_where_one_is_short(two_ranks: RankGroup, offload: bool, model: str, overlap: bool) -> None:
    """Rank 1 has no memory at the second request; nothing of the first is lost, and the next window waits again."""
    setup = Setup(2, offload, model, "fp32", at="auto", zero={"overlap_comm": overlap})
    results = two_ranks.run(windows_while_memory, setup, [[PLENTY, PLENTY], [PLENTY, 0]])
    expected = reference([WINDOW, WINDOW], 2)
    for updates, seen, _ in results:
        assert wrong_updates(updates, expected) == 0
        assert [local > 0 for local in seen] == [True, True, *[False] * 3, *[True] * 5]
    assert "does not keep its gradients until the window's end" in str(results[1][2])
    assert "does not keep" not in str(results[0][2])


def test_nothing_waits_where_memory_is_short_from_the_start(two_ranks: RankGroup) -> None:
    results = two_ranks.run(windows_while_memory, Setup(2, at="auto"), [[0, PLENTY], [PLENTY, PLENTY]])
    for updates, seen, _ in results:
        assert wrong_updates(updates, reference([WINDOW, WINDOW], 2)) == 0
        assert [local > 0 for local in seen] == [False] * 5 + [True] * 5


# --- the same weights -----------------------------------------------------------------------------------------------


def final_weights(setups: list[Setup]) -> list[list[torch.Tensor]]:
    weights = []
    for setup in setups:
        engine: Any = build(setup)
        for _ in range(2):
            for micro in WINDOW:
                backward(engine, micro)
            engine.step(divisor=4.0)
        weights.append(masters(engine))
        engine.destroy()
    return weights


@pytest.mark.parametrize("offload", [False, True])
def test_the_modes_end_with_the_same_bits(two_ranks: RankGroup, offload: bool) -> None:
    setups = [
        Setup(stage, offload, "bf16", "fp32", optimizer="adamw", at=at)
        for stage, modes in ((1, ("request", "window")), (2, ("backward", "request", "window", "auto")))
        for at in modes
    ]
    for weights in two_ranks.run(final_weights, setups):
        for each in weights[1:]:
            assert all(map(torch.equal, each, weights[0]))
