"""Weights that a user writes between steps count at stage 3 too, where they are whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from requestzero.probe.counters import Operators
from support.engines import build, masters
from support.ranks import RankGroup
from support.setup import Setup
from support.stage_3 import GATHERED, PLACES
from support.windows import ALL, LR, Micro, backward
from support.written_weights import (
    Write,
    data_in_place,
    in_place,
    load_state_dict,
    nothing,
    one_element,
    set_masters_beyond_bf16,
    window,
    wrong_after_writes,
)


@dataclass(frozen=True)
class Gathered:
    """A write on the first rank, where DeepSpeed has gathered the weights."""

    write: Write

    @property
    def __name__(self) -> str:
        return f"gathered {self.write.__name__}"

    def __call__(self, module: torch.nn.Module) -> None:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                self.write(module)


DIRECT: list[Write] = [nothing, in_place, one_element, load_state_dict, data_in_place]
WRITES: list[Write] = [Gathered(write) for write in DIRECT]


@pytest.mark.parametrize(("model", "accum"), [("bf16", "fp32"), ("fp32", "fp32")])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_gathered_writes_count(two_ranks: RankGroup, place: dict[str, Any], model: str, accum: str) -> None:
    zero = {**place.get("zero", {}), **GATHERED, "sub_group_size": 8}
    setup = Setup(stage=3, model=model, accum=accum, **{**place, "zero": zero})
    assert two_ranks.run(wrong_after_writes, setup, WRITES) == [[], []]


def written_directly(setup: Setup, folder: str) -> list[bool]:
    """True where a write to weights that are left gathered counts: in a step, a released cache, and a checkpoint."""
    engine = build(setup)
    set_masters_beyond_bf16(engine)
    window(engine, 0)
    dtype = next(engine.module.parameters()).dtype
    right = []
    for saves, releases in ((False, False), (False, True), (True, False)):
        before = masters(engine)
        in_place(engine.module)
        if releases:
            engine.empty_partition_cache()
        rounded = [master.to(dtype).float() for master in before]
        written = [weight.clamp(-0.25, 0.25) for weight in rounded]
        start = [torch.where(a == b, m, a) for a, b, m in zip(written, rounded, before, strict=True)]
        gradients = [0.0 * master for master in before] if saves else window(engine, 1)
        if saves:
            engine.save_checkpoint(folder)
        expected = [weight - LR * gradient for weight, gradient in zip(start, gradients, strict=True)]
        right.append(all(torch.equal(a, b) for a, b in zip(masters(engine), expected, strict=True)))
    engine.destroy()
    return right


@pytest.mark.parametrize("model", ["bf16", "fp32"])
@pytest.mark.parametrize("place", ["device", "both"])
def test_weights_that_stay_gathered_are_written_directly(
    three_ranks: RankGroup, tmp_path: Path, place: str, model: str
) -> None:
    setup = Setup(stage=3, model=model, accum="fp32", **PLACES[place])
    assert three_ranks.run(written_directly, setup, str(tmp_path)) == [[True, True, True]] * 3


def test_without_comparison_they_do_not_count(two_ranks: RankGroup) -> None:
    setup = Setup(stage=3, model="bf16", zero=GATHERED, config={"requestzero": {"compare_weights": False}})
    for wrong in two_ranks.run(wrong_after_writes, setup, [nothing, Gathered(in_place)]):
        assert set(wrong) == {"gathered in_place"}


def set_masters(setup: Setup, local: bool) -> list[float]:
    """First weights of the masters after they were set, and an update of the others."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    engine = build(setup)
    for parameter in list(engine.module.parameters())[:2]:
        if local:
            safe_set_local_fp32_param(parameter, torch.full_like(parameter.ds_tensor, 5.0, dtype=torch.float32))
        else:
            safe_set_full_fp32_param(parameter, torch.full(tuple(parameter.ds_shape), 5.0))
    backward(engine, Micro((False, False, *ALL[2:]), 1))
    engine.step()
    found = [float(weight.view(-1)[0]) for weight in masters(engine)[:2]]
    engine.destroy()
    return found


@pytest.mark.parametrize("zero", [{}, GATHERED], ids=["left gathered", "released"])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("model", ["bf16", "fp32"])
def test_masters_that_the_user_sets_win(two_ranks: RankGroup, model: str, local: bool, zero: dict[str, Any]) -> None:
    assert two_ranks.run(set_masters, Setup(stage=3, model=model, zero=zero), local) == [[5.0, 5.0]] * 2


def written_after_their_masters(setup: Setup, write: Write, folder: str) -> list[list[float]]:
    """First two elements of two masters that were set: after each of two writes to the first, and after an update."""
    from deepspeed.utils import safe_set_full_fp32_param

    engine = build(setup)
    window(engine, 0)
    parameters = list(engine.module.parameters())[:2]
    for parameter in parameters:
        safe_set_full_fp32_param(parameter, torch.full(tuple(parameter.ds_shape), 5.1))
    rows = []
    for value in (7.0, 6.0):
        write(engine, parameters[0], value)
        engine.save_checkpoint(folder)
        rows.append([float(weight.view(-1)[at]) for weight in masters(engine)[:2] for at in (0, 1)])
    backward(engine, Micro((False, False, *ALL[2:]), 2))
    engine.step()
    rows.append([float(weight.view(-1)[at]) for weight in masters(engine)[:2] for at in (0, 1)])
    engine.destroy()
    return rows


def first_element(engine: Any, parameter: torch.nn.Parameter, value: float) -> None:
    with torch.no_grad():
        parameter.view(-1)[0] = value


def first_element_gathered(engine: Any, parameter: torch.nn.Parameter, value: float) -> None:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            first_element(engine, parameter, value)


@pytest.mark.parametrize(("zero", "write"), [({}, first_element), (GATHERED, first_element_gathered)])
@pytest.mark.parametrize(("model", "offload"), [("bf16", False), ("bf16", True), ("fp32", False), ("fp32", True)])
def test_a_weight_that_is_written_later_than_its_master_wins(
    two_ranks: RankGroup, tmp_path: Path, model: str, offload: bool, zero: dict[str, Any], write: Any
) -> None:
    """Element by element; the others of its master, and other masters, stay as they were set."""
    setup = Setup(stage=3, model=model, offload=offload, zero=zero)
    set_to = pytest.approx(5.1)
    for rows in two_ranks.run(written_after_their_masters, setup, write, str(tmp_path)):
        assert rows == [[value, set_to, set_to, set_to] for value in (7.0, 6.0, 6.0)]


def operators_of_bringing_back(setup: Setup) -> tuple[int, int]:
    """Copies, one by one and at once, with which weights that stay gathered are looked after."""
    engine = build(setup)
    window(engine, 0)
    with Operators() as counted:
        engine.optimizer.written.adopt()
    engine.destroy()
    return counted.counts["aten.copy_"], counted.counts["aten._foreach_copy_"]


@pytest.mark.parametrize("place", ["device", "params"])
def test_weights_that_stay_gathered_are_copied_at_once(two_ranks: RankGroup, place: str) -> None:
    setup = Setup(stage=3, model="fp32", **PLACES[place])
    assert two_ranks.run(operators_of_bringing_back, setup) == [(0, 1)] * 2
