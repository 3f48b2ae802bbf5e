"""ZeRO 3: every way to lose or replay a gradient, once with this optimizer and once with DeepSpeed's own."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_deepspeed_features import (
    accumulation_steps,
    assert_resumed,
    coalesced,
    load_and_go_on,
    universal_checkpoint,
)

import requestzero
from support.engines import build, masters
from support.fp16 import fp16_on_cpu, fp16_where_needed
from support.models import OneWeight, full_grad
from support.muon import batch, build_muon
from support.overflow_configs import fp16_masters, overflow_config
from support.poison import interrupt_backward, poisoned_backward
from support.ranks import RankGroup
from support.recorded_windows import CASES, TwoLayers
from support.setup import Setup
from support.stage_3 import GATHERED, PLACES, change_of, feed_whole, setup_of, whole_weights
from support.updates import applied_by, assert_exact_window, assert_sums
from support.windows import ALL, Layers, Micro, backward, reference

every_place = pytest.mark.parametrize("place", PLACES)
nothing_and_both = pytest.mark.parametrize("place", ["device", "both"])
SOME = (True, False, True, False, True)
LAST_ABSENT = (True, True, True, True, False)


# --- the recorded windows -------------------------------------------------------------------------------------------


def play(setup: Setup, requestzero: bool) -> list[list[list[float]]]:
    """Per recorded case and window the applied gradient of both layers."""
    return [_play(build(setup, requestzero, TwoLayers()), case) for case in CASES]


def _play(engine: Any, case: dict[str, Any]) -> list[list[float]]:
    import deepspeed.comm as dist

    applied = []
    for window in case["windows"]:
        before = masters(engine)
        for micro in window:
            engine.set_gradient_accumulation_boundary(micro["request_end"])
            x = torch.full((1, 4), float(micro["value_by_rank"][dist.get_rank()]), device=engine.device)
            engine.backward(engine(x, micro["uses"]))
        engine.step()
        applied.append(change_of(engine, before))
    engine.destroy()
    return applied


@pytest.mark.parametrize("place", ["device", "both"])
def test_the_recorded_windows(two_ranks: RankGroup, place: str) -> None:
    setup = setup_of(place, zero=GATHERED)
    expected = [case["expected_gradient"] for case in CASES]
    assert two_ranks.run(play, setup, True) == [expected] * 2
    assert sum(a != b for a, b in zip(two_ranks.run(play, setup, False)[0], expected, strict=True)) >= 3


# --- inf in a parameter that is absent from the next window ---------------------------------------------------------


def after_an_overflow(setup: Setup, requestzero: bool) -> list[bool]:
    """Return true for each of three windows that was applied, of which the first has inf; and for finite weights."""
    with fp16_where_needed(setup.model):
        engine = build(setup, requestzero)
        applied = []
        for seed, uses in enumerate((ALL, LAST_ABSENT, ALL)):
            if seed == 0:
                poisoned_backward(engine, Micro(uses, seed), math.inf, rank=1)
            else:
                backward(engine, Micro(uses, seed))
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
            applied.append(engine.was_step_applied())
        applied.append(all(bool(weight.isfinite().all()) for weight in masters(engine)))
        engine.destroy()
    return applied


FP16 = {"model": "fp16", "accum": "fp16", "config": {"fp16": {"enabled": True, "loss_scale": 1.0}}}
BF16 = {"model": "bf16", "accum": "bf16"}


@pytest.mark.parametrize(
    ("place", "dtypes", "stock"),
    [
        ("device", FP16, [False, False, True, True]),
        ("optimizer", FP16, [False, False, True, True]),
        ("device", BF16, [False, False, True, True]),
        ("optimizer", BF16, [False, True, True, False]),  # the infinity of a skipped window is applied
    ],
)
def test_an_overflow_ends_with_its_window(
    two_ranks: RankGroup, place: str, dtypes: dict[str, Any], stock: list[bool]
) -> None:
    setup = setup_of(place, **dtypes)
    assert two_ranks.run(after_an_overflow, setup, True) == [[False, True, True, True]] * 2
    assert two_ranks.run(after_an_overflow, setup, False) == [stock] * 2


# --- one weight -----------------------------------------------------------------------------------------------------


def discarded(engine: Any) -> list[float]:
    """8 that ``zero_grad()`` discards, then 3."""
    feed_whole(engine, 8.0, request_end=False)
    engine.zero_grad()
    before = masters(engine)
    feed_whole(engine, 3.0)
    engine.step()
    return change_of(engine, before)


def lone_step(engine: Any) -> list[float]:
    """A step after a step."""
    feed_whole(engine, 2.0)
    engine.step()
    before = masters(engine)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    return change_of(engine, before)


def two_forwards_first(engine: Any) -> list[float]:
    """1 and 2, both of whose forwards come before both backwards."""
    before = masters(engine)
    engine.set_gradient_accumulation_boundary(True)
    losses = [engine(torch.full(tuple(engine.module.weight.ds_shape), value)) for value in (1.0, 2.0)]
    for loss in losses:
        engine.backward(loss)
    engine.step()
    return change_of(engine, before)


def set_between(engine: Any) -> list[float]:
    """1, set to 5 at a boundary, then 2 more: what is read, and what is applied."""
    from deepspeed.utils import safe_set_full_grad

    before = masters(engine)
    feed_whole(engine, 1.0)
    safe_set_full_grad(engine.module.weight, torch.full(tuple(engine.module.weight.ds_shape), 5.0))
    feed_whole(engine, 2.0)
    read = full_grad(engine).flatten()[0].item()
    engine.step()
    return [read, *change_of(engine, before)]


def finalised_twice(engine: Any) -> list[float]:
    """2 and 1, with a request end that is said twice."""
    before = masters(engine)
    feed_whole(engine, 2.0, request_end=False)
    engine.end_request()
    engine.end_request()
    feed_whole(engine, 1.0)
    engine.step()
    return change_of(engine, before)


def one_weight(setup: Setup, requestzero: bool, scenario: Any, size: int) -> Any:
    engine = build(setup, requestzero, model=OneWeight(size))
    try:
        return scenario(engine)
    except Exception as error:
        return type(error).__name__
    finally:
        engine.destroy()


SCENARIOS: list[tuple[Any, list[float], dict[str, Any]]] = [
    (discarded, [3.0], {}),
    (lone_step, [0.0], {"device": "TypeError", "optimizer": [2.0]}),
    (two_forwards_first, [3.0], {"device": [2.0], "optimizer": [2.0]}),
    (set_between, [7.0, 7.0], {"device": [7.0, 7.0], "optimizer": [3.0, 3.0]}),
    (finalised_twice, [3.0], {}),
]


@every_place
@pytest.mark.parametrize(("scenario", "expected", "stock"), SCENARIOS)
def test_one_weight(
    two_ranks: RankGroup, place: str, scenario: Any, expected: list[float], stock: dict[str, Any]
) -> None:
    """Of nine elements, which two ranks do not divide."""
    setup = setup_of(place, zero=GATHERED)
    assert two_ranks.run(one_weight, setup, True, scenario, 9) == [expected] * 2
    if place in stock:
        assert two_ranks.run(one_weight, setup, False, scenario, 8) == [stock[place]] * 2


def set_where_ranks_do_not_divide(requestzero: bool) -> str:
    from deepspeed.utils import safe_set_full_grad

    engine = build(Setup(stage=3), requestzero, model=OneWeight(9))
    feed_whole(engine, 1.0)
    try:
        safe_set_full_grad(engine.module.weight, torch.full((9,), 5.0))
    except RuntimeError as error:
        return type(error).__name__
    finally:
        engine.destroy()
    return ""


def test_stock_raises_on_one_rank_where_the_ranks_do_not_divide(two_ranks: RankGroup) -> None:
    assert two_ranks.run(set_where_ranks_do_not_divide, True) == ["", ""]
    assert two_ranks.run(set_where_ranks_do_not_divide, False) == ["", "RuntimeError"]


# --- what users read and write --------------------------------------------------------------------------------------


def read_and_set(setup: Setup) -> None:
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_local_grad,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_local_grad,
    )

    engine = build(setup)
    params = list(engine.module.parameters())
    assert not any(safe_get_full_grad(param).any() for param in params), "no window yet"
    for round_ in range(2):
        backward(engine, Micro(SOME, round_))
        for param in params[1:3]:  # one that has had no gradient, and one that has
            local = safe_get_local_grad(param)
            safe_set_local_grad(param, torch.full_like(local, 3.0))
        safe_set_full_grad(params[3], torch.full(tuple(params[3].ds_shape), 4.0))
        before = masters(engine)
        engine.step()
        changes = change_of(engine, before)
        assert changes[1:4] == [3.0, 3.0, 4.0]
        assert not safe_get_full_grad(params[3]).any(), "of no window"
    for param in params:
        safe_set_full_fp32_param(param, torch.full(tuple(param.ds_shape), 0.5))
        assert bool((safe_get_full_fp32_param(param) == 0.5).all())
    assert_exact_window(engine, [Micro(ALL, 9)])
    engine.destroy()


@nothing_and_both
def test_gradients_and_weights_are_read_and_set(three_ranks: RankGroup, place: str) -> None:
    """Of parameters that three ranks do not divide."""
    three_ranks.run(read_and_set, setup_of(place, model="bf16"))


def states_read_and_set(setup: Setup) -> None:
    """Adam's first moment is a tenth of the first gradient."""
    import deepspeed.comm as dist
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_optimizer_state,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    engine = build(setup)
    micros = [Micro(ALL, 1), Micro(SOME, 2)]
    for micro in micros:
        backward(engine, micro)
    engine.step()
    expected = reference([micros], dist.get_world_size())[0]
    for param, gradient in zip(engine.module.parameters(), expected, strict=True):
        moment = safe_get_full_optimizer_state(param, "exp_avg").cpu().double()
        torch.testing.assert_close(moment, gradient / 10, rtol=1e-6, atol=0)
        safe_set_full_optimizer_state(param, torch.full(tuple(param.ds_shape), 0.25), "exp_avg")
        assert bool((safe_get_full_optimizer_state(param, "exp_avg") == 0.25).all())
        local = safe_get_local_optimizer_state(param, "exp_avg")
        safe_set_local_optimizer_state(param, torch.full_like(local, 0.5), "exp_avg")
        assert bool((safe_get_full_optimizer_state(param, "exp_avg") == 0.5).all())
        safe_set_local_fp32_param(param, torch.full_like(safe_get_local_fp32_param(param), 2.0))
        assert bool((safe_get_full_fp32_param(param) == 2.0).all())
    engine.destroy()


@nothing_and_both
def test_optimizer_states_are_read_and_set(three_ranks: RankGroup, place: str) -> None:
    three_ranks.run(states_read_and_set, setup_of(place, model="bf16", optimizer="adamw"))


# --- 16-bit masters -------------------------------------------------------------------------------------------------


def beyond_fp16(requestzero: bool) -> tuple[bool, bool]:
    """A window whose fp32 sum is above the fp16 range, with fp16 masters: applied, and whether weights stay finite."""
    setup = Setup(stage=3, offload=True, model="fp16", accum="fp32", optimizer="cpu_adam", config=fp16_masters())
    with fp16_on_cpu():
        engine = build(setup, requestzero, model=OneWeight())
        feed_whole(engine, 60000.0, request_end=False)
        feed_whole(engine, 60000.0)
        engine.step()
        result = engine.was_step_applied(), all(bool(weight.isfinite().all()) for weight in masters(engine))
        engine.destroy()
    return result


def test_a_sum_beyond_the_host_dtype(two_ranks: RankGroup) -> None:
    assert two_ranks.run(beyond_fp16, True) == [(False, True)] * 2
    assert two_ranks.run(beyond_fp16, False) == [(True, False)] * 2


# --- the rest of DeepSpeed ------------------------------------------------------------------------------------------


@nothing_and_both
def test_coalesced_requests(two_ranks: RankGroup, place: str) -> None:
    two_ranks.run(coalesced, setup_of(place, model="bf16"))


@nothing_and_both
def test_gradient_accumulation_steps(two_ranks: RankGroup, place: str) -> None:
    two_ranks.run(accumulation_steps, setup_of(place, config={"gradient_accumulation_steps": 4}))


def sums_moved(setup: Setup) -> None:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    engine = build(setup)
    micros = [Micro(ALL, 1), Micro(SOME, 2), Micro(ALL, 3)]
    for micro in micros:
        backward(engine, micro)
        engine.offload_states(include=[OffloadStateTypeEnum.lp_grads], pin_memory=False)
        engine.reload_states()
    assert_sums(applied_by(engine), micros)
    engine.destroy()


def test_sums_can_be_offloaded_inside_a_window(two_ranks: RankGroup) -> None:
    two_ranks.run(sums_moved, setup_of("device", model="bf16"))


def interrupted(setup: Setup) -> None:
    engine = build(setup)
    assert_exact_window(engine, [Micro(ALL, 1)])
    backward(engine, Micro(ALL, 2, False))
    interrupt_backward(engine)
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\), which discards the update window"):
        backward(engine, Micro(ALL, 3))
    engine.zero_grad()
    assert_exact_window(engine, [Micro(SOME, 4), Micro(ALL, 5)])
    engine.destroy()


def clipped_and_divided(setup: Setup) -> list[float]:
    """The norms and changes of a step by a divisor, of a clipped one, and the mean over tokens."""
    engine = build(setup, model=OneWeight(4))
    found = []
    for step, fed in (({"divisor": 3.0}, 6.0), ({"normalization": "mean"}, 2.0), ({"normalization": "token"}, 8.0)):
        before = masters(engine)
        for _ in range(2):
            engine.set_gradient_accumulation_boundary(True)
            loss = engine(torch.full((4,), fed, dtype=engine.module.weight.dtype))
            engine.backward(loss, weight=2.0)
        engine.step(**step)
        found += [float(engine.get_global_grad_norm()), *change_of(engine, before)]
    engine.destroy()
    return found


@nothing_and_both
def test_divisors_and_clipping(two_ranks: RankGroup, place: str) -> None:
    plain = two_ranks.run(clipped_and_divided, setup_of(place, zero={"sub_group_size": 1}))
    # A token counts once: two micro-batches of 2 tokens on each of two ranks, and a mean over ranks that is undone.
    assert plain == [[8.0, 4.0, 4.0, 2.0, 8.0, 4.0]] * 2
    clipped = two_ranks.run(clipped_and_divided, setup_of(place, config={"gradient_clipping": 1.0}))
    assert clipped[0][::2] == [8.0, 4.0, 8.0]
    assert clipped[0][1::2] == pytest.approx([0.5] * 3, rel=1e-6)


def overflowing(setup: Setup, policy: str) -> Any:
    """Three requests, the second of which is not finite on rank 1."""
    engine = build(setup)
    micros = [Micro(ALL, 1), Micro(ALL, 2), Micro(SOME, 3)]
    before = masters(engine)
    for name, micro in zip("abc", micros, strict=True):
        engine.begin_request(name, micro_batches=1)
        if name == "b":
            poisoned_backward(engine, micro, math.nan, rank=1)
        else:
            backward(engine, micro)
    if policy == "drop_request":
        assert engine.request_backup_bytes == engine.optimizer.grad_partitions_flat_buffer.nbytes
        assert engine.dropped_requests == 1
        assert_sums(applied_by(engine), [micros[0], micros[2]])
        engine.destroy()
        return ""
    try:
        engine.step()
    except Exception as error:
        assert change_of(engine, before) == [0.0] * 5
        assert_exact_window(engine, [Micro(SOME, 4)])
        engine.destroy()
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


@nothing_and_both
@pytest.mark.parametrize("policy", ["drop_request", "raise"])
def test_overflow_policies(two_ranks: RankGroup, place: str, policy: str) -> None:
    setup = setup_of(place, config=overflow_config("bf16", on_overflow=policy), model="bf16")
    messages = two_ranks.run(overflowing, setup, policy)
    assert len(set(messages)) == 1
    if policy == "raise":
        assert "GradientOverflowError" in messages[0]
        assert "gradients of request 'b' (request 2 of 3), on rank 1 in layers.4.weight" in messages[0]


@nothing_and_both
def test_an_interrupted_backward(one_rank: RankGroup, place: str) -> None:
    one_rank.run(interrupted, setup_of(place, zero={"reduce_bucket_size": 8}))


class Experts(torch.nn.Module):
    """Two layers, one of which each rank runs; as a leaf module, the other one's gradient is zero there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return (self.first, self.second)[which](x)


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = torch.nn.Linear(4, 4, bias=False), Experts()
        for param in self.parameters():
            torch.nn.init.zeros_(param)
        torch.nn.init.eye_(self.gate.weight)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.experts(self.gate(x), which).sum()


def leaf_modules(requestzero: bool) -> list[float]:
    """Each rank runs its own expert: of the mean over ranks, both get half."""
    import deepspeed.comm as dist

    setup = Setup(stage=3, zero={**GATHERED, "leaf_module": {"classes": [f"{__name__}.Experts"]}})
    engine = build(setup, requestzero, model=Gated())
    before = masters(engine)
    for _ in range(2):
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(torch.ones(1, 4), dist.get_rank()))
    engine.step()
    changes = change_of(engine, before)
    engine.destroy()
    return changes


@pytest.mark.parametrize("requestzero", [True, False])
def test_leaf_modules(two_ranks: RankGroup, requestzero: bool) -> None:
    """Right with DeepSpeed's own too: a leaf module's absent parameters have gradients of zero."""
    assert two_ranks.run(leaf_modules, requestzero) == [[0.0, 1.0, 1.0]] * 2


Place = tuple[bool, str, str]
"""Whether the optimizer is offloaded, and the dtypes of model and sum."""


# --- Muon -----------------------------------------------------------------------------------------------------------


def muon(place: Place, requests: int, scale: float, requestzero: bool = True) -> list[torch.Tensor]:
    """Weights after two windows of two micro-batches, whose losses are scaled, and their sum divided by as much."""
    offload, model, accum = place
    zero = Setup(stage=3, offload=offload, zero={"reduce_scatter": False}).deepspeed_config()["zero_optimization"]
    engine = build_muon(3, offload, model, accum, requestzero, zero_optimization=zero)
    for window in range(2):
        for micro in range(2):
            engine.set_gradient_accumulation_boundary(micro == 1 or requests == 2)
            engine.backward(engine(batch(engine, window, micro)) * scale)
        engine.step(**({"divisor": scale} if requestzero else {}))
    weights = masters(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize(
    "place",
    [(False, "fp32", "fp32"), (True, "fp32", "fp32"), (False, "bf16", "bf16"), (True, "bf16", "fp32")],
    ids=lambda place: "-".join(map(str, place)),
)
def test_muon(two_ranks: RankGroup, place: Place) -> None:
    """However a window is cut, and whatever divides it, bit for bit; within rounding what stock makes of the same."""
    (plain, _), (cut, _), (scaled, _) = (two_ranks.run(muon, place, *each) for each in ((1, 1.0), (2, 1.0), (1, 2.0)))
    assert_equal(plain, cut)
    assert_equal(plain, scaled)
    for ours, stock in zip(plain, two_ranks.run(muon, place, 1, 1.0, False)[0], strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)


def muon_after_an_overflow() -> list[bool]:
    """Return true for each of two windows that was applied, of which the first has inf; and for finite weights."""
    zero = Setup(stage=3, zero={"reduce_scatter": False}).deepspeed_config()["zero_optimization"]
    engine = build_muon(3, False, "bf16", "bf16", zero_optimization=zero)
    applied = []
    for window, factor in enumerate((math.inf, 1.0)):
        engine.backward(engine(batch(engine, window, 0)) * factor)
        engine.step()
        applied.append(engine.was_step_applied())
    applied.append(all(bool(weight.isfinite().all()) for weight in masters(engine)))
    engine.destroy()
    return applied


def test_muon_skips_what_is_not_finite(one_rank: RankGroup) -> None:
    assert one_rank.run(muon_after_an_overflow) == [[False, True, True]]


def without_optimizer() -> None:
    config = Setup(stage=3).deepspeed_config()
    config.pop("optimizer", None)
    with pytest.raises(ValueError, match=r"was given no optimizer.*call deepspeed\.initialize for inference"):
        requestzero.initialize(model=OneWeight(4), config=config)


def test_an_optimizer_is_asked_for(one_rank: RankGroup) -> None:
    one_rank.run(without_optimizer)


def one_after_another() -> None:
    module = OneWeight(4)
    for _ in range(2):
        engine = build(setup_of("device", zero=GATHERED), model=module)
        feed_whole(engine, 3.0)
        engine.step()
        engine.destroy()


def test_two_engines_of_one_module(one_rank: RankGroup) -> None:
    one_rank.run(one_after_another)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def save(setup: Setup, requestzero: bool, folder: str) -> list[torch.Tensor]:
    engine = build(setup, requestzero)
    for seed in range(2):
        backward(engine, Micro(ALL, seed))
        engine.step()
    engine.save_checkpoint(folder)
    weights = whole_weights(engine)
    engine.destroy()
    return weights


def load(setup: Setup, requestzero: bool, folder: str) -> list[list[torch.Tensor]]:
    engine = build(setup, requestzero)
    engine.load_checkpoint(folder)
    loaded = whole_weights(engine)
    backward(engine, Micro(ALL, 9))
    engine.step()
    stepped = whole_weights(engine)
    engine.destroy()
    return [loaded, stepped]


@nothing_and_both
@pytest.mark.parametrize("ours_saves", [False, True])
def test_checkpoints_are_exchanged_with_stock(
    two_ranks: RankGroup, place: str, ours_saves: bool, tmp_path: Path
) -> None:
    setup = setup_of(place, model="bf16", optimizer="adamw")
    saved = two_ranks.run(save, setup, ours_saves, str(tmp_path))[0]
    by_other, by_same = (two_ranks.run(load, setup, whose, str(tmp_path))[0] for whose in (not ours_saves, ours_saves))
    assert_equal(saved, by_other[0])
    assert_equal(by_other[1], by_same[1])


def assert_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert len(some) == len(others) > 0
    assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("place", ["device", "optimizer"])
def test_universal_checkpoints(two_ranks: RankGroup, place: str, tmp_path: Path) -> None:
    """With several sub-groups in a parameter group, of which DeepSpeed lets all count their steps in one tensor."""
    setup = setup_of(place, model="bf16", optimizer="adamw", groups=2, zero={"sub_group_size": 1})
    two_ranks.run(universal_checkpoint, setup, str(tmp_path))
    universal = replace(setup, config={"checkpoint": {"load_universal": True}})
    assert_resumed(
        two_ranks.run(load_and_go_on, universal, str(tmp_path), "universal", True),
        two_ranks.run(load_and_go_on, setup, str(tmp_path), "saved", False),
        flats=5,
    )


# --- other stages and engines ---------------------------------------------------------------------------------------


def trained(setup: Setup) -> list[torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Layers()
        for param in model.parameters():
            torch.nn.init.normal_(param)
    engine = build(setup, model=model, lr=1e-2)
    for step in range(4):
        for request in range(2):
            backward(engine, Micro(SOME if step == 2 else ALL, 10 * step + request))
        engine.step(normalization="mean")
    weights = masters(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_weights_are_those_of_stage_2(two_ranks: RankGroup, optimizer: str) -> None:
    """Bit for bit: the sums are exact in fp32."""
    of_stage_2 = two_ranks.run(trained, Setup(optimizer=optimizer))[0]
    for place in PLACES:
        assert_equal(two_ranks.run(trained, setup_of(place, optimizer=optimizer))[0], of_stage_2)


def classes_side_by_side() -> list[str]:
    from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3

    engines = [build(Setup(stage=3), requestzero) for requestzero in (True, False, True)]
    names = [type(engine.optimizer).__name__ for engine in engines]
    for engine in engines:
        engine.destroy()
    return [*names, SuperOffloadOptimizer_Stage3.__mro__[1].__name__]


def test_other_engines_keep_the_stock_class(one_rank: RankGroup) -> None:
    stock = "DeepSpeedZeroOptimizer_Stage3"
    assert one_rank.run(classes_side_by_side)[0] == ["RequestZeROStage3Optimizer", stock] * 2
