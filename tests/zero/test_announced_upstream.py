"""On a DeepSpeed with the announced changes: still exact, nothing is added twice, and the option is read once."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import requestzero
from requestzero.config.supported import check_supported
from requestzero.doctor.stock_losses import stock_run
from requestzero.doctor.verify.updates import telling_windows
from requestzero.probe.counters import Operators, host_memory
from support.announced_upstream import OPTION, announced, announced_config
from support.engines import build
from support.grid import PLACES, SUMS, every_place, every_sum
from support.ranks import RankGroup
from support.releases import needs_deepspeed
from support.setup import Setup
from support.updates import run_windows
from support.windows import ALL, Micro, Window, backward, reference, wrong_updates

pytestmark = needs_deepspeed("the stand-in changes methods of its optimizer")

# Every parameter takes part in every backward: what the announced changes make right.
REGULAR: list[Window] = [
    [Micro(ALL, 1, True), Micro(ALL, 2, False), Micro(ALL, 3, True)],
    [Micro(ALL, 4, False), Micro(ALL, 5, True), Micro(ALL, 6, True), Micro(ALL, 7, True)],
    [Micro(ALL, 8, True)],
    [Micro(ALL, 9, True), Micro(ALL, 10, True)],
]


def run(setup: Setup, windows: list[Window], ours: bool, changed: bool = True) -> int:
    """Return the number of wrong updates."""
    import deepspeed.comm as dist

    expected = reference(windows, dist.get_world_size())
    if not changed:
        return wrong_updates(run_windows(setup, windows, ours), expected)
    with announced():
        return wrong_updates(run_windows(setup, windows, ours), expected)


@every_place
@every_sum
def test_the_stand_in_does_what_is_announced(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str
) -> None:
    """DeepSpeed's own optimizer is right with it on these windows, and wrong without, but with one fp32 sum."""
    setup = Setup(stage=stage, offload=offload, model=model, accum=accum)
    assert two_ranks.run(run, setup, REGULAR, ours=False) == [0, 0]
    keeps_one_sum = (model, accum) == ("bf16", "fp32")
    without = two_ranks.run(run, setup, REGULAR, ours=False, changed=False)
    assert without == [0, 0] if keeps_one_sum else min(without) > 0


OFFLOADED = Setup(stage=2, offload=True, model="bf16", accum="fp32")
MASTERS_16 = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}


def left_after_a_request(setup: Setup) -> tuple[bool, int]:
    """Of DeepSpeed's optimizer after a request of one backward: a partition on the device, and host accumulators."""
    with announced():
        engine = build(setup, requestzero=False)
        backward(engine, Micro(ALL, 0, True))
        optimizer = engine.optimizer
        found = optimizer.averaged_gradients.get(0) is not None, len(optimizer.accumulated_grads_in_cpu)
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("setup", "on_device"),
    [
        (OFFLOADED, False),
        (replace(OFFLOADED, zero={OPTION: True}), True),
        (replace(OFFLOADED, optimizer="cpu_adam", config=MASTERS_16), True),
        (replace(OFFLOADED, accum="bf16"), False),
    ],
    ids=["released", "retained", "16-bit masters", "no partition"],
)
def test_the_stand_in_keeps_what_is_announced(two_ranks: RankGroup, setup: Setup, on_device: bool) -> None:
    """A partition that the host gradient cannot give back stays, and one backward needs no accumulator beside it."""
    assert two_ranks.run(left_after_a_request, setup) == [(on_device, 0)] * 2


OPTIONS: list[dict[str, Any]] = [
    {},
    {"zero": {"overlap_comm": True}},
    {"checkpointing": "reentrant"},
    {"zero": {"reduce_bucket_size": 8}, "groups": 3},
    {"managed": False},
]
SETUPS = [
    Setup(stage=stage, offload=offload, model=model, accum=accum, **OPTIONS[(place + sums) % len(OPTIONS)])
    for place, (stage, offload) in enumerate(PLACES)
    for sums, (model, accum) in enumerate(SUMS)
]
RETAINED = [
    Setup(stage=stage, offload=True, model="bf16", retain=value) for stage in (1, 2) for value in (True, "auto")
]


@pytest.mark.parametrize("setup", [*SETUPS, *RETAINED], ids=str)
def test_this_package_is_exact_on_it(two_ranks: RankGroup, setup: Setup) -> None:
    windows = [*REGULAR, *telling_windows(0), *telling_windows(1)]
    assert two_ranks.run(run, setup, windows, ours=True) == [0, 0]


def option_by_reader(value: bool) -> tuple[Any, Any]:
    """Return the option as this package and as DeepSpeed read it."""
    with announced():
        engine = build(replace(OFFLOADED, retain=value))
        found = engine.options.retain_gpu_grad_partition_until_step, engine.optimizer.retains
        engine.destroy()
    return found


def copies_of_two_requests(value: bool, changed: bool) -> tuple[int, int, int, int]:
    """Return the copies to and from the host gradients, as this package counts them and as PyTorch sees them."""
    with announced() if changed else nullcontext():
        engine = build(replace(OFFLOADED, retain=value))
        with Operators(host_memory(engine)) as seen:
            for seed in range(2):
                backward(engine, Micro(ALL, seed, True))
        traffic = engine.partition_traffic
        counted = traffic.publications, traffic.restores, seen.copies_into_destinations, seen.copies_from_host
        engine.destroy()
    return counted


@pytest.mark.parametrize("value", [False, True])
def test_the_option_is_read_once(two_ranks: RankGroup, value: bool) -> None:
    """DeepSpeed's own release stays at its default, whatever is given."""
    assert two_ranks.run(option_by_reader, value) == [(value, False)] * 2


@pytest.mark.parametrize("value", [False, True])
def test_nothing_is_copied_twice(two_ranks: RankGroup, value: bool) -> None:
    copies = two_ranks.run(copies_of_two_requests, value, changed=True)
    assert [each[:2] for each in copies] == [(2, 0 if value else 1)] * 2
    assert copies == two_ranks.run(copies_of_two_requests, value, changed=False)


def test_the_config_is_taken_where_deepspeed_knows_the_option() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, OPTION: True},
    }
    with announced_config():
        check_supported(config, torch.nn.Linear(1, 1))
        assert stock_run(config).stage == 2
        requestzero.RequestZeRO(config=config)
        requestzero.RequestZeROPlugin(hf_ds_config=config)
