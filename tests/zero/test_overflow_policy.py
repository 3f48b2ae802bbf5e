"""Messages of a skipped update, ``on_overflow="raise"``, skips in a row, counters over a resume, and fp32."""

from __future__ import annotations

import math
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

import requestzero
from requestzero.probe.counters import Operators
from requestzero.zero.overflow.skips import name_requests
from support.engines import build, masters, masters_and_state
from support.fp16 import fp16_on_cpu, fp16_where_needed
from support.grid import FP16_SUMS, PLACES, SUMS, every_place
from support.logs import logged_by
from support.models import OneWeight, feed
from support.overflow_configs import fp16_masters, overflow_config
from support.poison import SPLIT, poisoned_backward
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import applied_by, assert_sums
from support.windows import ALL, Micro, backward

FIRST_FOUR = (True, True, True, True, False)
# position of the request, value, rank, layer and element: a layer that is absent later, or one that is split.
POISONS = [
    (0, math.nan, 0, 4, -1),
    (1, math.inf, 1, SPLIT, 0),
    (2, -math.inf, 0, SPLIT, -1),
    (0, math.inf, 1, 4, 0),
    (1, math.nan, 1, 4, -1),
    (2, math.nan, 0, 0, 0),
]
CASES = [
    (stage, offload, model, accum, *rest)
    for ((model, accum), (stage, offload)), *rest in zip(
        product(SUMS + FP16_SUMS, PLACES), cycle(POISONS), cycle(["sgd", "adamw", "adamw"]), strict=False
    )
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"zero": {"overlap_comm": True}},
    {"zero": {"reduce_bucket_size": 8}},
    {"checkpointing": "reentrant"},
    {"zero": {"contiguous_gradients": False}, "groups": 3},
]
every_case = pytest.mark.parametrize(("stage", "offload", "model", "accum", "bad", "optimizer"), CASES)


def bad_window(engine: Any, bad: tuple[Any, ...]) -> None:
    """Three requests ``r0``, ``r1``, ``r2``, one of them bad."""
    for position in range(3):
        engine.begin_request(f"r{position}")
        micro = Micro(FIRST_FOUR if bad[3] == 4 and position > bad[0] else ALL, position)
        if position == bad[0]:
            poisoned_backward(engine, micro, *bad[1:])
        else:
            backward(engine, micro)


def good_window(engine: Any, seed: int) -> list[Micro]:
    micros = [Micro(ALL, seed), Micro(FIRST_FOUR, seed + 1)]
    for micro in micros:
        backward(engine, micro)
    return micros


def update_that_is_not_applied(setup: Setup, bad: tuple[Any, ...]) -> tuple[str, list[str], list[str]]:
    """The error, and the log messages of this package and of DeepSpeed, of a bad window between two good ones."""
    with fp16_where_needed(setup.model):
        engine = build(setup)
        good_window(engine, 1)
        engine.step()
        before = masters_and_state(engine)
        bad_window(engine, bad)
        error = ""
        with logged_by("requestzero") as messages, logged_by("DeepSpeed") as by_deepspeed:
            try:
                engine.step()
            except requestzero.GradientOverflowError as raised:
                error = str(raised)
        assert not engine.was_step_applied()
        assert all(map(torch.equal, before, masters_and_state(engine)))
        assert not engine.update_window.is_open
        assert engine.grad_partition_bytes == 0
        assert (engine.attempted_updates, engine.applied_updates, engine.skipped_updates) == (2, 1, 1)
        assert (engine.consecutive_skips, engine.dropped_requests) == (1, 0)
        skip = engine.last_skip
        assert (skip.update, skip.cause) == (2, "NaN" if math.isnan(bad[1]) else "inf")
        assert skip.request_ids == ("r0", "r1", "r2")
        scale = 16.0 if setup.model == "fp16" else 1.0
        assert (skip.loss_scale_before, skip.loss_scale_after, engine.current_loss_scale) == (scale,) * 3
        assert engine.loss_scale_history == ((0, scale),)
        micros = good_window(engine, 5)
        applied = applied_by(engine)
        assert engine.consecutive_skips == 0
        if setup.optimizer == "sgd":
            assert_sums(applied, micros)
        engine.destroy()
    return error, messages, by_deepspeed


@every_case
def test_a_skip_is_told_once_on_rank_0(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str, bad: tuple[Any, ...], optimizer: str
) -> None:
    setup = Setup(stage, offload, model, accum, optimizer=optimizer, config=overflow_config(model))
    (error, messages, by_deepspeed), silent = two_ranks.run(update_that_is_not_applied, setup, bad)
    cause, scale = "NaN" if math.isnan(bad[1]) else "inf", 16 if model == "fp16" else 1
    assert messages == [
        f"Skipped update 2 ({cause}; requests 'r0', 'r1', 'r2'; loss scale {scale}): its gradient is not finite, "
        "nothing was applied. 1 skipped in a row, 1 of 2 in all."
    ]
    assert (error, by_deepspeed) == ("", [])
    assert silent == ("", [], [])


@pytest.mark.parametrize(
    ("stage", "offload", "model", "accum", "bad", "option"),
    [(*case[:5], option) for case, option in zip(CASES, cycle(OPTIONS), strict=False)],
)
def test_raise_names_request_parameter_and_rank(
    two_ranks: RankGroup,
    stage: int,
    offload: bool,
    model: str,
    accum: str,
    bad: tuple[Any, ...],
    option: dict[str, Any],
) -> None:
    config = overflow_config(model, on_overflow="raise")
    setup = Setup(stage, offload, model, accum, config=config, **option)
    (error, messages, by_deepspeed), other = two_ranks.run(update_that_is_not_applied, setup, bad)
    position, _, rank, layer, _ = bad
    origin = (
        f"It arose in the gradients of request 'r{position}' (request {position + 1} of 3), on rank {rank} in "
        f"layers.{layer}.weight. Nothing was applied"
    )
    assert origin in error
    assert error.startswith("The gradient is not finite in update 2 (")
    assert (messages, by_deepspeed) == ([], [])
    assert other == (error, [], [])


def run_values(engine: Any, values: list[float]) -> str:
    """A request of each value; the error of the step."""
    for value in values:
        engine.begin_request(f"value {value:g}")
        feed(engine, value)
    try:
        engine.step()
    except requestzero.GradientOverflowError as raised:
        return str(raised)
    return ""


def sum_beyond_fp16(stage: int) -> tuple[str, str]:
    config = fp16_masters(on_overflow="raise")
    setup = Setup(stage=stage, offload=True, model="fp16", accum="fp32", optimizer="cpu_adam", config=config)
    with fp16_on_cpu():
        engine = build(setup, model=OneWeight())
        cancelled = run_values(engine, [60000.0, 60000.0, -60000.0])
        error = run_values(engine, [60000.0, 60000.0, -60000.0, 60000.0])
        engine.destroy()
    return cancelled, error


@pytest.mark.parametrize("stage", [1, 2])
def test_a_sum_that_overflows_is_told_as_such(two_ranks: RankGroup, stage: int) -> None:
    for cancelled, error in two_ranks.run(sum_beyond_fp16, stage):
        assert cancelled == ""
        assert (
            "Before reduction the gradients of every rank and request were finite: it arose in their sum, by the "
            "reduction over ranks, the accumulation over the window, or the cast to the dtype of the host gradient; "
            "with request 'value 60000' (request 4 of 4), in weight (owned by rank 0), in weight (owned by rank 1)."
        ) in error


def test_the_origin_in_words() -> None:
    """The earliest request on any rank, and every rank where it was not finite; long lists are cut."""
    from requestzero.zero.overflow.origin import LocalOrigin, describe_origin

    names = tuple(f"layers.{i}.weight" for i in range(10))
    fine = LocalOrigin(("a", None), None, (), None, ())
    first, second = LocalOrigin(("a", None), 0, names, 0, names), LocalOrigin(("a", None), 1, names[:1], 1, names[:1])
    assert describe_origin([second, fine]) == (
        "It arose in the gradients of request 2 of 2, on rank 0 in layers.0.weight."
    )
    assert describe_origin([second, first, first]) == (
        "It arose in the gradients of request 'a' (request 1 of 2), "
        f"on rank 1 in {', '.join(names[:8])}, 2 more; on rank 2 in {', '.join(names[:8])}, 2 more."
    )
    edited = describe_origin([fine, LocalOrigin(("a", None), None, (), None, names[:1])], edited=True)
    assert edited.endswith("or in a gradient that was set by the caller, in layers.0.weight (owned by rank 1).")
    assert name_requests(tuple(range(10))) == "requests 0, 1, 2, 3, 4, 5, 6, 7, 2 more"


def reads_of_a_window(setup: Setup, poison: float | None = None) -> tuple[list[int], int, bool, bool]:
    """Host reads of two backwards and of the step; whether it was applied and left the weights finite."""
    engine = build(setup)
    reads = []
    for seed in range(2):
        engine.set_gradient_accumulation_boundary(True)
        with Operators() as operators:
            if poison is None:
                backward(engine, Micro(ALL, seed))
            else:
                poisoned_backward(engine, Micro(ALL, seed), poison, 1)
        reads.append(operators.host_reads)
    with Operators() as operators:
        engine.step()
    finite = all(bool(m.isfinite().all()) for m in masters(engine))
    norm, applied = float(engine.get_global_grad_norm()), engine.was_step_applied()
    assert math.isfinite(norm) == (poison is None)
    assert engine.skipped_updates == (not applied)
    engine.destroy()
    return reads, operators.host_reads, applied, finite


@every_place
def test_raise_reads_nothing_in_backward(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    setup = Setup(stage, offload, "bf16", "fp32", config=overflow_config("bf16", on_overflow="raise"))
    assert two_ranks.run(reads_of_a_window, setup) == [([0, 0], 1, True, True)] * 2


@every_place
def test_fp32_is_not_inspected_unless_asked(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    """By default not even the norm is read, and a NaN is applied; clipping reads it, and skips as DeepSpeed does."""
    plain, checked = Setup(stage, offload), Setup(stage, offload, config=overflow_config("fp32"))
    clipped = Setup(stage, offload, config={"gradient_clipping": 1.0})
    assert two_ranks.run(reads_of_a_window, plain) == [([0, 0], 0, True, True)] * 2
    assert two_ranks.run(reads_of_a_window, plain, math.nan) == [([0, 0], 0, True, False)] * 2
    assert two_ranks.run(reads_of_a_window, checked) == [([0, 0], 1, True, True)] * 2
    assert two_ranks.run(reads_of_a_window, checked, math.inf) == [([0, 0], 1, False, True)] * 2
    assert two_ranks.run(reads_of_a_window, clipped, math.nan) == [([0, 0], 1, False, True)] * 2


# --- skips in a row, and the loss scale -----------------------------------------------------------------------------


def skips_in_a_row(setup: Setup) -> list[str]:
    """Errors of seven windows, the first and third good, the others not finite."""
    with fp16_where_needed(setup.model):
        engine = build(setup, model=OneWeight())
        errors = [run_values(engine, [1.0 if i in (0, 2) else math.inf]) for i in range(7)]
        assert (engine.attempted_updates, engine.applied_updates, engine.skipped_updates) == (7, 2, 5)
        assert engine.consecutive_skips == 4
        engine.destroy()
    return errors


def test_too_many_skips_in_a_row_end_the_run(two_ranks: RankGroup) -> None:
    """With the requests of the skipped windows and how the loss scale went; four follow the last applied update."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    config = {"fp16": fp16, "overflow": {"max_consecutive_skips": 3}}
    errors, others = two_ranks.run(skips_in_a_row, Setup(1, False, "fp16", "fp32", config=config))
    assert errors == others
    assert [bool(error) for error in errors] == [False] * 5 + [True] * 2
    assert errors[5] == (
        "3 updates in a row were skipped for gradients that are not finite, and overflow.max_consecutive_skips is 3. "
        "Skipped: update 4 (inf; request 'value inf'; loss scale 8, then 4); update 5 (inf; request 'value inf'; loss "
        "scale 4, then 2); update 6 (inf; request 'value inf'; loss scale 2, then 1). Loss scale: 16 from update 1 on, "
        "8 from update 3 on, 4 from update 5 on, 2 from update 6 on, 1 from update 7 on. Look at these requests and at "
        "the learning rate, or allow more."
    )
    assert errors[6].startswith("The dynamic loss scale cannot fall any further: update 7 (inf; ")


@pytest.mark.parametrize("model", ["bf16", "fp32"])
def test_without_a_limit_any_number_is_skipped(two_ranks: RankGroup, model: str) -> None:
    setup = Setup(2, True, model, model, config=overflow_config(model))
    assert two_ranks.run(skips_in_a_row, setup) == [[""] * 7] * 2


# --- checkpoints ----------------------------------------------------------------------------------------------------


def counters(engine: Any) -> tuple[Any, ...]:
    return (
        engine.attempted_updates,
        engine.applied_updates,
        engine.skipped_updates,
        engine.consecutive_skips,
        engine.dropped_requests,
        engine.last_skip,
        engine.loss_scale_history,
        engine.current_loss_scale,
    )


def saved_and_resumed(folder: str) -> None:
    """The counters of the uninterrupted run, the scale and its hysteresis; DeepSpeed loads the checkpoint as well."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 2, "loss_scale_window": 2}
    setup = Setup(2, True, "fp16", "fp32", config={"fp16": fp16, "overflow": {"max_consecutive_skips": 4}})
    values = [1.0, math.inf, math.inf, math.inf, 1.0, 1.0, 1.0, 1.0, math.nan]
    with fp16_on_cpu():
        engine = build(setup, model=OneWeight())
        for value in values[:3]:
            run_values(engine, [value])
        engine.save_checkpoint(folder, client_state={"mine": 1})
        for value in values[3:]:
            run_values(engine, [value])
        wanted, weights = counters(engine), masters(engine)
        resumed = build(setup, model=OneWeight())
        assert resumed.load_checkpoint(folder)[1]["mine"] == 1
        assert (resumed.consecutive_skips, resumed.current_loss_scale) == (2, 8.0)
        for value in values[3:]:
            run_values(resumed, [value])
        assert counters(resumed) == wanted
        assert all(map(torch.equal, weights, masters(resumed)))
        only_module = build(setup, model=OneWeight())
        only_module.load_checkpoint(folder, load_module_only=True)
        assert counters(only_module)[:5] == (0, 0, 0, 0, 0)
        stock = build(Setup(2, True, "fp16", "fp32", config={"fp16": fp16}), requestzero=False, model=OneWeight())
        stock.load_checkpoint(folder)
        assert (stock.global_steps, stock.skipped_steps, stock.optimizer.loss_scale) == (3, 2, 8.0)
        stock.save_checkpoint(folder, tag="stock")
        resumed.load_checkpoint(folder, tag="stock")
        assert counters(resumed)[:6] == (3, 1, 2, 0, 0, None)
        for each in (engine, resumed, only_module, stock):
            each.destroy()


def test_counters_are_kept_over_save_and_resume(two_ranks: RankGroup, tmp_path: Path) -> None:
    two_ranks.run(saved_and_resumed, str(tmp_path))


def scheduled(setup: Setup) -> list[float]:
    """The learning rate after a good, a bad and a good window, with a scheduler of the engine's."""
    module = OneWeight()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine = requestzero.initialize(
        model=module,
        optimizer=optimizer,
        config=setup.deepspeed_config(),
        lr_scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )[0]
    rates = []
    for value in (1.0, math.nan, 1.0):
        run_values(engine, [value])
        rates.append(engine.get_lr()[0])
    engine.destroy()
    return rates


@pytest.mark.parametrize("policy", ["skip", "raise", "drop_request"])
def test_schedulers_move_on_applied_updates_only(two_ranks: RankGroup, policy: str) -> None:
    setup = Setup(2, False, "bf16", "fp32", config=overflow_config("bf16", on_overflow=policy))
    assert two_ranks.run(scheduled, setup) == [[0.5, 0.5, 0.25]] * 2
