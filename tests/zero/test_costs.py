"""Costs of a boundary backward and a step, as counts, against DeepSpeed's own optimizer."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock, patch

import deepspeed
import pytest
import torch

import requestzero
from requestzero.probe.counters import Operators
from requestzero.probe.engines import announce
from requestzero.probe.models import Chain
from support.engines import build
from support.fp16 import fp16_on_cpu
from support.grid import FP16_SUMS, SUMS, every_place
from support.overflow_configs import STATIC_FP16
from support.ranks import RankGroup
from support.setup import Setup

# Operators that look at values: checks, and what they are made of.
INSPECTIONS = ("isfinite", "isinf", "isnan", "eq", "ne", "any", "all", "amax", "amin", "max", "min", "logical_or")
NORMS = ("linalg_vector_norm", "_foreach_norm", "norm")

CALLS_PER_BACKWARD = 172
"""Python calls of a backward in this package and DeepSpeed, beside those of its gradients."""


class Many(Chain):
    def __init__(self, tensors: int) -> None:
        super().__init__(tensors, width=8)


def precision(model: str, check: bool) -> dict[str, Any]:
    """DeepSpeed's section for it; the check can be switched in bf16 only."""
    sections: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True, "check_grad_overflow": check}},
        "fp16": STATIC_FP16,
    }
    return sections[model]


def configurations(stage: int, offload: bool) -> list[Setup]:
    """Every dtype of model and sum, with the check on and, where it can be, off."""
    return [
        Setup(stage=stage, offload=offload, model=model, accum=accum, config=precision(model, check))
        for model, accum in SUMS + FP16_SUMS
        for check in ((True, False) if model == "bf16" else (True,))
    ]


def counted_window(engine: Any) -> tuple[Operators, Operators]:
    """The operators of one window's lone boundary backward, and of its step."""
    x = torch.ones(1, 8, dtype=next(engine.module.parameters()).dtype, device=engine.device)
    # Stock's optimizer for stage 1 with fp32 accumulation on a 16-bit model is another class.
    masters = getattr(engine.optimizer, "single_partition_of_fp32_groups", [])
    announce(engine, 1, window_end=True)
    engine.set_gradient_accumulation_boundary(True)
    loss = engine(x)
    with Operators([p.grad for p in masters if p.grad is not None]) as in_backward:
        engine.backward(loss)
    with Operators() as in_step:
        engine.step()
    return in_backward, in_step


def costs(setups: list[Setup], requestzero: bool, tensors: int) -> list[dict[str, Counter[str]]]:
    """Counts of the second window, for every setup."""
    counts = []
    with fp16_on_cpu():
        for setup in setups:
            engine: Any = build(setup, requestzero, model=Many(tensors))
            counted_window(engine)
            parts = dict(zip(("backward", "step"), counted_window(engine), strict=True))
            engine.destroy()
            counts.append({part: operators.summary() for part, operators in parts.items()})
    return counts


def assert_cheaper(setups: list[Setup], ours: Any, stock: Any, tensors: int) -> None:
    for setup, our, theirs in zip(setups, ours, stock, strict=True):
        for part in ("backward", "step"):
            print(f"{setup}, {tensors} tensors, {part}: {dict(our[part])}, stock {dict(theirs[part])}")
            assert our[part]["operators"] < theirs[part]["operators"], f"{setup}: {part}"
        checked = setup.model == "fp16" or setup.config.get("bf16", {}).get("check_grad_overflow", False)
        assert (our["backward"]["reads"], our["step"]["reads"]) == (0, int(checked)), setup
        if setup.offload:
            assert our["backward"]["host copies"] == 1, "one for the whole partition"
            owned = tensors // 2
            assert theirs["backward"]["host copies"] == theirs["backward"]["reads"] == owned
            assert theirs["step"]["reads"] > owned


def operators_of_autograd(dtype: str, tensors: int) -> int:
    """Operators of a backward without an engine."""
    kind: torch.dtype = getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype])
    with fp16_on_cpu():
        loss = Many(tensors).to(kind)(torch.ones(1, 8, dtype=kind))
        with Operators() as operators:
            loss.backward()
    return operators.total


def assert_no_more_than_before(setups: list[Setup], ours: Any, tensors: int) -> None:
    """A backward's operators beyond autograd's: each tensor's, and those of the bucket and the sum. A step's."""
    for setup, our in zip(setups, ours, strict=True):
        by_tensor, once = (1, 16) if setup.stage == 1 else (3, 16)
        backward = our["backward"]["operators"] - operators_of_autograd(setup.model, tensors)
        assert backward <= by_tensor * tensors + once, f"{setup}: backward"
        assert our["step"]["operators"] <= 44, f"{setup}: step"


@every_place
def test_boundary_costs_less_than_stock(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    """Fewer operators in every configuration; the same at any size."""
    setups = configurations(stage, offload)
    ours, stock = (two_ranks.run(costs, setups, requestzero, 32)[0] for requestzero in (True, False))
    assert_cheaper(setups, ours, stock, 32)
    assert_no_more_than_before(setups, ours, 32)


def walks_over_all_parameters(setup: Setup, requestzero: bool) -> int:
    """Number of times that two backwards have counted the parameters of the model that take part in them."""
    from deepspeed.runtime.zero import stage_1_and_2

    count = stage_1_and_2.count_used_parameters_in_backward
    with patch.object(stage_1_and_2, "count_used_parameters_in_backward", Mock(wraps=count)) as counted:
        engine = build(setup, requestzero, model=Many(4))
        for _ in range(2):
            counted_window(engine)
        engine.destroy()
        return counted.call_count


@every_place
def test_no_backward_walks_over_all_parameters(one_rank: RankGroup, stage: int, offload: bool) -> None:
    setup = Setup(stage=stage, offload=offload)
    assert [one_rank.run(walks_over_all_parameters, setup, whose)[0] for whose in (True, False)] == [0, 2]


def test_the_step_does_not_grow_with_the_number_of_tensors(two_ranks: RankGroup) -> None:
    setups = [
        Setup(stage=1, offload=True, model="bf16", accum="bf16", config=precision("bf16", True)),
        Setup(stage=2, offload=True, model="bf16", accum="fp32", config=precision("bf16", True)),
        Setup(stage=2, offload=True),
    ]
    ours, stock = (two_ranks.run(costs, setups, requestzero, 128)[0] for requestzero in (True, False))
    assert_cheaper(setups, ours, stock, 128)
    assert all(each["step"]["operators"] < 64 for each in ours)
    assert all(each["step"]["operators"] > 4 * 128 for each in stock)


def python_calls(run: Callable[[], Any]) -> int:
    """Number of functions of this package and of DeepSpeed that ``run`` calls in this thread."""
    folders = tuple(str(Path(package.__file__ or "").parent) for package in (requestzero, deepspeed))
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(folders)

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def calls_of_backward(setup: Setup, tensors: int) -> int:
    """Number of calls of the third backward of a request, whose gradients are only added to what waits."""
    engine: Any = build(setup, model=Many(tensors))
    engine.set_gradient_accumulation_boundary(False)
    x = torch.ones(1, 8, dtype=next(engine.module.parameters()).dtype, device=engine.device)
    for _ in range(2):
        engine.backward(engine(x))
    loss = engine(x)
    calls = python_calls(lambda: engine.backward(loss))
    engine.destroy()
    return calls


ONLY_ADDING = [
    Setup(stage=1),
    Setup(stage=1, model="bf16", accum="fp32"),
    Setup(stage=1, zero={"overlap_comm": True}),
    Setup(stage=2, at="window"),
]


@pytest.mark.parametrize("setup", ONLY_ADDING, ids=str)
def test_a_gradient_that_is_only_added_costs_a_few_calls(two_ranks: RankGroup, setup: Setup) -> None:
    """A hook, a look whether a backward is on, and the addition; in 16 bits DeepSpeed's look for what is left."""
    by_tensor = 3 if setup.model == "fp32" else 4
    few, many = (two_ranks.run(calls_of_backward, setup, tensors) for tensors in (16, 32))
    for fewer, more in zip(few, many, strict=True):
        assert more - fewer <= by_tensor * 16
        assert fewer - by_tensor * 16 <= CALLS_PER_BACKWARD


def inspected(setup: Setup, requestzero: bool) -> tuple[set[str], int]:
    """Operators that inspect gradients in the second window's backward and step, and the host reads of both."""
    engine: Any = build(setup, requestzero, model=Many(4))
    counted_window(engine)
    parts = counted_window(engine)
    engine.destroy()
    names = {name.removeprefix("aten.") for part in parts for name in part.counts}
    return names & {*INSPECTIONS, *NORMS}, sum(part.host_reads for part in parts)


@every_place
@pytest.mark.parametrize("accum", ["bf16", "fp32"])
def test_nothing_is_checked_where_the_check_is_off(two_ranks: RankGroup, stage: int, offload: bool, accum: str) -> None:
    """The norm that ``get_global_grad_norm()`` returns is left, which ``compute_grad_norm: false`` switches off."""
    setup = Setup(stage=stage, offload=offload, model="bf16", accum=accum, config=precision("bf16", False))
    names, reads = two_ranks.run(inspected, setup, True)[0]
    assert names <= set(NORMS)
    assert reads == 0
    names, reads = two_ranks.run(inspected, setup, False)[0]
    assert names & set(INSPECTIONS), "this can fail: DeepSpeed's own optimizer checks"


@pytest.mark.parametrize("stage", [1, 2])
def test_nothing_looks_at_gradients_where_nobody_wants_their_norm(two_ranks: RankGroup, stage: int) -> None:
    off = precision("bf16", False)
    for accum in ("bf16", "fp32") if stage == 2 else ("bf16",):
        setup = Setup(stage=stage, model="bf16", accum=accum, config=off, zero={"compute_grad_norm": False})
        assert two_ranks.run(inspected, setup, True)[0] == (set(), 0)


def operators_of_step(setup: Setup, divisor: float) -> list[tuple[int, int]]:
    """Operators and host reads of the steps of three windows."""
    seen = []
    with fp16_on_cpu():
        engine: Any = build(setup, model=Many(8))
        x = torch.ones(1, 8, dtype=next(engine.module.parameters()).dtype, device=engine.device)
        for _ in range(3):
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(x))
            with Operators() as operators:
                engine.step(divisor=divisor)
            seen.append((operators.total, operators.host_reads))
        engine.destroy()
    return seen


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("model", ["bf16", "fp16"])
def test_a_divisor_costs_nothing_where_the_step_divides_anyway(
    two_ranks: RankGroup, stage: int, offload: bool, model: str
) -> None:
    """With clipping (bf16) or a loss scale (fp16) the divisor is part of that division: not one operator more."""
    config: dict[str, Any] = {
        "bf16": {"gradient_clipping": 1e-6},
        "fp16": STATIC_FP16,
    }
    setup = Setup(stage=stage, offload=offload, model=model, accum="fp32", config=config[model])
    without, with_divisor = (two_ranks.run(operators_of_step, setup, divisor)[0] for divisor in (1.0, 3.0))
    assert with_divisor == without
