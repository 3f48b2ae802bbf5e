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
from support.stage_3 import GATHERED, PLACES, setup_of

TENSORS, WIDTH = 32, 8
SUB_GROUPS = 8


def in_sub_groups(place: str, model: str, accum: str, **config: Any) -> Setup:
    zero = {**GATHERED, "sub_group_size": TENSORS * WIDTH**2 // 2 // SUB_GROUPS}
    return setup_of(place, model=model, accum=accum, zero=zero, config=config)


@dataclass
class Costs:
    backward: int
    step: int
    """Operators."""
    backward_reads: int
    step_reads: int
    first_copies: int
    """In the window's first backward."""
    copies: int
    """In the second one, which is counted otherwise."""
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
        loss = engine(x)
        with Operators() as in_first:
            engine.backward(loss)
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
        copies_in(in_first),
        copies_in(in_backward),
        reduced.call_count,
        sum(storages.values()),
        prepared.copied,
    )


def copies_in(operators: Operators) -> int:
    return operators.counts["aten.copy_"] + operators.counts["aten._foreach_copy_"]


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


@pytest.mark.parametrize("place", PLACES)
def test_a_window_costs_less_than_stock(two_ranks: RankGroup, place: str) -> None:
    owned = TENSORS * WIDTH**2 // 2
    for model, accum in SUMS:
        setup = in_sub_groups(place, model, accum)
        ours, stock = (two_ranks.run(costs, setup, whose)[0] for whose in (True, False))
        print(f"{setup}: {ours}, stock {stock}")
        assert ours.backward < stock.backward
        assert ours.step < stock.step
        assert ours.copies == TENSORS + 1  # into the bucket one by one, and one of what was reduced
        assert ours.first_copies == ours.copies + 1  # and into the sum, all parts in one
        assert stock.copies == (2 * TENSORS + 1 if setup.offload else TENSORS + 1)
        assert ours.first_copies < stock.first_copies
        assert (ours.backward_reads, ours.all_reduces, stock.all_reduces) == (0, 1, SUB_GROUPS)
        assert ours.step_reads <= (model != "fp32") + 2  # one of the device, two of tensors on the host
        if setup.offload:
            shared = accum == "fp32"  # as the masters are
            expected = (owned * 4, owned * 8) if shared else (owned * 6, owned * 6)
            assert (ours.gradient_bytes, stock.gradient_bytes) == expected
        else:
            assert ours.step_copies == (0 if accum == "fp32" else owned * 4)
            assert stock.step_copies == owned * 4


def test_nothing_is_read_where_nothing_is_decided(two_ranks: RankGroup) -> None:
    unchecked = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    found = two_ranks.run(costs, in_sub_groups("optimizer", "bf16", "fp32", **unchecked), True)[0]
    assert (found.backward_reads, found.all_reduces) == (0, 1)
    assert found.step_reads <= 1  # of a tensor on the host
