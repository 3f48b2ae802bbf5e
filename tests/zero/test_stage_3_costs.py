"""ZeRO 3: costs of a boundary backward and a step, as counts, against DeepSpeed's own optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from requestzero.probe.counters import Operators, host_memory
from requestzero.probe.models import Chain
from support.engines import build
from support.grid import SUMS
from support.ranks import RankGroup
from support.setup import Setup
from support.stage_3 import GATHERED

TENSORS, WIDTH = 32, 8
SUB_GROUPS = 8


def setup_of(offload: bool, model: str, accum: str, **config: Any) -> Setup:
    zero = {**GATHERED, "sub_group_size": TENSORS * WIDTH**2 // 2 // SUB_GROUPS}
    return Setup(stage=3, offload=offload, model=model, accum=accum, zero=zero, config=config)


@dataclass
class Costs:
    backward: int
    step: int
    """Operators."""
    backward_reads: int
    step_reads: int
    copies: int
    """In the backward."""
    all_reduces: int
    """In the step."""
    gradient_bytes: int
    """Of all gradient storages of this rank that a window keeps."""
    step_copies: int
    """Bytes of what the step copies of a sub-group: its gradient is another tensor than the sum's stretch."""


def costs(setup: Setup, requestzero: bool) -> Costs:
    """Of the last window of one request of two micro-batches, of which the second is counted."""
    import deepspeed.comm as dist

    engine: Any = build(setup, requestzero, model=Chain(TENSORS, WIDTH))
    assert len(engine.optimizer.fp16_groups) == SUB_GROUPS
    x = torch.ones(1, WIDTH, dtype=next(engine.module.parameters()).dtype)
    for _ in range(2):
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(x))
        engine.set_gradient_accumulation_boundary(True)
        loss = engine(x)
        with Operators() as in_backward:
            engine.backward(loss)
        kept = [engine.optimizer.grad_partitions_flat_buffer, *host_memory(engine)]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
        prepared = Prepared(engine)
        with (
            Operators() as in_step,
            patch.object(dist, "all_reduce", Mock(wraps=dist.all_reduce)) as reduced,
            patch.object(engine.optimizer, "_prepare_fp32_grad_for_sub_group", prepared),
        ):
            engine.step()
    engine.destroy()
    return Costs(
        in_backward.total,
        in_step.total,
        in_backward.host_reads,
        in_step.host_reads,
        in_backward.counts["aten.copy_"] + in_backward.counts["aten._foreach_copy_"],
        reduced.call_count,
        sum(storages.values()),
        prepared.copied,
    )


class Prepared:
    """Counts the bytes of gradients that a step on the device makes anew."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer
        self._original = engine.optimizer._prepare_fp32_grad_for_sub_group
        self.copied = 0

    def __call__(self, index: int) -> None:
        self._original(index)
        gradient = self._optimizer.fp32_partitioned_groups_flat[index].grad
        buffer = self._optimizer.grad_partitions_flat_buffer
        if gradient.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
            self.copied += gradient.nbytes


@pytest.mark.parametrize("offload", [False, True])
def test_a_window_costs_less_than_stock(two_ranks: RankGroup, offload: bool) -> None:
    owned = TENSORS * WIDTH**2 // 2
    for model, accum in SUMS:
        setup = setup_of(offload, model, accum)
        ours, stock = (two_ranks.run(costs, setup, whose)[0] for whose in (True, False))
        print(f"{setup}: {ours}, stock {stock}")
        assert ours.backward < stock.backward
        assert ours.step < stock.step
        assert ours.copies == TENSORS + 1  # into the bucket one by one, and one of all parts into the sum
        assert stock.copies == (2 * TENSORS + 1 if offload else TENSORS + 1)
        assert (ours.backward_reads, ours.all_reduces, stock.all_reduces) == (0, 1, SUB_GROUPS)
        assert ours.step_reads <= (model != "fp32") + 2  # one of the device, two of tensors on the host
        if offload:
            shared = accum == "fp32"  # as the masters are
            expected = (owned * 4, owned * 8) if shared else (owned * 6, owned * 6)
            assert (ours.gradient_bytes, stock.gradient_bytes) == expected
        else:
            assert ours.step_copies == (0 if accum == "fp32" else owned * 4)
            assert stock.step_copies == owned * 4


def test_nothing_is_read_where_nothing_is_decided(two_ranks: RankGroup) -> None:
    unchecked = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    found = two_ranks.run(costs, setup_of(True, "bf16", "fp32", **unchecked), True)[0]
    assert (found.backward_reads, found.all_reduces) == (0, 1)
    assert found.step_reads <= 1  # of a tensor on the host
