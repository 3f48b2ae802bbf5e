"""The life of an update window: how requests end, what a step applies, what discards, what nothing survives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.engines import build, masters
from support.grid import every_place, every_sum
from support.models import OneWeight, feed, full_grad
from support.poison import interrupt_backward
from support.ranks import RankGroup
from support.setup import Setup
from support.updates import applied_by, assert_exact_window, assert_sums
from support.windows import ALL, Micro, backward, inputs_of, reference

# --- counts and ends of requests ------------------------------------------------------------------------------------


def counts(setup: Setup) -> list[tuple[int, int, bool, bool]]:
    engine = build(setup)
    seen = []

    def note() -> None:
        window = engine.update_window
        seen.append((window.micro_batches, window.requests, window.request_open, window.is_open))

    note()
    for seed, end in enumerate((True, False, False, True)):
        backward(engine, Micro(ALL, seed, end))
        note()
    engine.step()
    note()
    engine.destroy()
    return seen


@every_place
def test_window_counts_micro_batches_and_requests(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    expected = [
        (0, 0, False, False),
        (1, 1, False, True),
        (2, 1, True, True),
        (3, 1, True, True),
        (4, 2, False, True),
        (0, 0, False, False),
    ]
    assert two_ranks.run(counts, Setup(stage=stage, offload=offload)) == [expected] * 2


def ended_afterwards(setup: Setup) -> None:
    """A service learns only after a backward that it was the request's last; ending twice changes nothing."""
    engine = build(setup)
    for _ in range(2):
        micros = [Micro(ALL, seed, False) for seed in (1, 2, 3)]
        for micro in micros[:2]:
            backward(engine, micro, mark=setup.managed)
        engine.end_request()
        engine.end_request()
        assert engine.update_window.requests == 1
        backward(engine, micros[2], mark=setup.managed)
        engine.end_request()
        assert engine.update_window.requests == 2
        if setup.managed:
            engine.set_gradient_accumulation_boundary(True)
        assert_sums(applied_by(engine), micros)
    engine.destroy()


@every_place
@every_sum
@pytest.mark.parametrize("managed", [True, False])
def test_a_request_can_be_ended_after_its_last_backward(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str, managed: bool
) -> None:
    two_ranks.run(ended_afterwards, Setup(stage=stage, offload=offload, model=model, accum=accum, managed=managed))


def step_ends_an_open_request(setup: Setup) -> None:
    engine = build(setup)
    micros = [Micro(ALL, 1, True), Micro(ALL, 2, False)]
    for micro in micros:
        backward(engine, micro)
    engine.set_gradient_accumulation_boundary(True)
    assert_sums(applied_by(engine), micros)
    engine.destroy()


@every_place
@every_sum
def test_step_ends_an_open_request(two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str) -> None:
    two_ranks.run(step_ends_an_open_request, Setup(stage=stage, offload=offload, model=model, accum=accum))


def finalised_twice(setup: Setup) -> None:
    engine = build(setup)
    micros = [Micro(ALL, 1), Micro(ALL, 2)]
    for micro in micros:
        backward(engine, micro, mark=False)
    engine.optimizer.finalize_gradient_accumulation_boundary()
    engine.optimizer.finalize_gradient_accumulation_boundary()
    assert_sums(applied_by(engine), micros)
    engine.destroy()


@pytest.mark.parametrize("offload", [False, True])
@every_sum
def test_finalising_twice_changes_nothing(two_ranks: RankGroup, offload: bool, model: str, accum: str) -> None:
    two_ranks.run(finalised_twice, Setup(stage=2, offload=offload, model=model, accum=accum, managed=False))


def two_backwards_of_one_forward(setup: Setup) -> None:
    engine = build(setup)
    engine.set_gradient_accumulation_boundary(True)
    loss = engine(*inputs_of(engine, 1), ALL)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    assert_sums(applied_by(engine), [Micro(ALL, 1), Micro(ALL, 1)])
    engine.destroy()


@every_place
@every_sum
def test_two_backwards_of_one_forward_count_twice_not_thrice(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str
) -> None:
    two_ranks.run(two_backwards_of_one_forward, Setup(stage=stage, offload=offload, model=model, accum=accum))


# --- steps ----------------------------------------------------------------------------------------------------------


def step_without_backward(setup: Setup) -> None:
    engine = build(setup)
    backward(engine, Micro(ALL, 1))
    engine.step()
    before, counters = masters(engine), (engine.global_steps, engine.skipped_steps, engine.applied_updates)
    state = {
        k: v.clone() for k, v in engine.optimizer.state[engine.optimizer.single_partition_of_fp32_groups[0]].items()
    }
    for _ in range(2):
        engine.step()
        assert not engine.was_step_applied()
    engine.optimizer.step()
    after = engine.optimizer.state[engine.optimizer.single_partition_of_fp32_groups[0]]
    assert all(torch.equal(state[k], after[k]) for k in state)
    assert state
    assert all(torch.equal(b, a) for b, a in zip(before, masters(engine), strict=True))
    assert (engine.global_steps, engine.skipped_steps, engine.applied_updates) == counters == (1, 0, 1)
    engine.destroy()


@every_place
def test_a_step_without_backward_applies_nothing(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    two_ranks.run(step_without_backward, Setup(stage=stage, offload=offload, model="bf16", optimizer="adamw"))


def divided(setup: Setup, divisor: float, clip: float) -> None:
    engine = build(setup)
    engine.optimizer.clip_grad = clip
    for window in ([1, 2], [3], [4, 5, 6]):
        micros = [Micro(ALL, seed) for seed in window]
        for micro in micros:
            backward(engine, micro)
        applied = applied_by(engine, divisor=divisor)
        exact = [g / divisor for g in reference([micros], 2)[0]]
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in exact])).item()
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-6)
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for got, wanted in zip(applied, exact, strict=True):
            if clip or divisor not in (1.0, 4.0):
                torch.testing.assert_close(got, wanted * factor, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(got, wanted)
    engine.destroy()


@every_place
@every_sum
@pytest.mark.parametrize(("divisor", "clip"), [(4.0, 0.0), (3.0, 0.0), (4.0, 0.5), (1.0, 0.5)])
def test_the_divisor_acts_before_norm_and_clipping(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str, divisor: float, clip: float
) -> None:
    # Masters are fp32: weights of order 1 hold updates of order 1 to 2**-24, hence the tolerance of 1e-6.
    two_ranks.run(divided, Setup(stage=stage, offload=offload, model=model, accum=accum), divisor, clip)


def bad_divisors() -> list[str]:
    engine = build(Setup())
    backward(engine, Micro(ALL, 1))
    messages = []
    for divisor in (0, -1.0, float("nan"), float("inf"), "2"):
        with pytest.raises(ValueError, match="use a positive finite number") as error:
            engine.step(divisor=divisor)
        messages.append(str(error.value))
    assert_sums(applied_by(engine), [Micro(ALL, 1)])
    engine.destroy()
    return messages


def test_a_divisor_must_be_positive_and_finite(two_ranks: RankGroup) -> None:
    assert [m.split(" ")[0] for m in two_ranks.run(bad_divisors)[0]] == [
        "divisor=0",
        "divisor=-1.0",
        "divisor=nan",
        "divisor=inf",
        "divisor='2'",
    ]


def unused_parameter(setup: Setup) -> str:
    engine = build(setup)
    backward(engine, Micro(ALL, 1))
    engine.step()
    backward(engine, Micro((True, False, True, True, False), 2))
    try:
        engine.step()
    except AssertionError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_unused_parameters_can_be_an_error(two_ranks: RankGroup) -> None:
    setup = Setup(offload=True, zero={"ignore_unused_parameters": False})
    messages = two_ranks.run(unused_parameter, setup)
    assert all("2 parameter shards received no gradient in this update window" in message for message in messages)
    assert [("layers.1.weight" in m, "layers.4.weight" in m) for m in messages] == [(True, False), (False, True)]


def backwards_without_parameters(setup: Setup) -> None:
    engine = build(setup)
    none = (False,) * 5
    for window in (
        [Micro(none, 1)],
        [Micro(ALL, 2), Micro(none, 3)],
        [Micro(none, 4, False), Micro(ALL, 5, False), Micro(none, 6)],
    ):
        for micro in window:
            backward(engine, micro)
        assert_sums(applied_by(engine), [micro for micro in window if micro.uses == ALL])
    engine.destroy()


@every_place
@every_sum
def test_a_backward_may_touch_no_parameter(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str
) -> None:
    setup = Setup(stage=stage, offload=offload, model=model, accum=accum, checkpointing="reentrant")
    two_ranks.run(backwards_without_parameters, setup)


# --- discarding -----------------------------------------------------------------------------------------------------


def zero_grad_discards(setup: Setup, through_optimizer: bool) -> None:
    engine = build(setup)
    discard = engine.optimizer.zero_grad if through_optimizer else engine.zero_grad
    for end in (True, False):
        backward(engine, Micro(ALL, 1, True))
        backward(engine, Micro(ALL, 2, end))
        discard()
        assert not engine.update_window.is_open
        assert engine.grad_partition_bytes == 0
        kept = [Micro(ALL, 3, False), Micro((True, False, True, True, True), 4, True)]
        assert_exact_window(engine, kept)
    backward(engine, Micro(ALL, 1))
    discard()
    engine.step()
    assert not engine.was_step_applied()
    engine.destroy()


@every_place
@every_sum
@pytest.mark.parametrize("through_optimizer", [False, True])
def test_zero_grad_discards_the_open_window(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str, through_optimizer: bool
) -> None:
    setup = Setup(stage=stage, offload=offload, model=model, accum=accum, retain=through_optimizer)
    two_ranks.run(zero_grad_discards, setup, through_optimizer)


def interrupted(setup: Setup) -> None:
    """An exception in the middle of a backward, then zero_grad(): the next window is exact."""
    engine = build(setup)
    backward(engine, Micro(ALL, 1, False))
    interrupt_backward(engine)
    engine.zero_grad()
    assert_exact_window(engine, [Micro(ALL, 3), Micro(ALL, 4)])
    engine.destroy()


@every_place
@every_sum
def test_an_interrupted_backward_can_be_discarded(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str
) -> None:
    setup = Setup(stage=stage, offload=offload, model=model, accum=accum, zero={"overlap_comm": True})
    two_ranks.run(interrupted, setup)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def saved_and_loaded(setup: Setup, folder: str) -> None:
    engine = build(setup)
    windows = [[Micro(ALL, 10 * w + m, m != 1) for m in range(3)] for w in range(4)]

    def train(some: list[list[Micro]]) -> None:
        for window in some:
            for micro in window:
                backward(engine, micro)
            engine.step(divisor=2.0)

    train(windows[:2])
    engine.save_checkpoint(folder)
    train(windows[2:])
    uninterrupted = masters(engine), engine.applied_updates
    backward(engine, Micro(ALL, 99))
    engine.load_checkpoint(folder)  # with the pending gradients of another window
    assert not engine.update_window.is_open
    train(windows[2:])
    assert all(torch.equal(a, b) for a, b in zip(uninterrupted[0], masters(engine), strict=True))
    assert engine.applied_updates == uninterrupted[1] == 4
    engine.destroy()


@every_place
@every_sum
def test_a_resumed_run_equals_the_uninterrupted_one(
    two_ranks: RankGroup, stage: int, offload: bool, model: str, accum: str, tmp_path: Any
) -> None:
    setup = Setup(stage=stage, offload=offload, model=model, accum=accum, optimizer="adamw")
    two_ranks.run(saved_and_loaded, setup, str(tmp_path))


def gradients_around_a_reduction(setup: Setup) -> tuple[torch.Tensor, torch.Tensor]:
    engine: Any = build(setup, model=OneWeight())
    feed(engine, 3.0)
    engine.step()
    before = full_grad(engine)
    engine.allreduce_gradients()
    return before, full_grad(engine)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_reduction_of_nothing_leaves_what_the_last_step_has_read(two_ranks: RankGroup, stage: int) -> None:
    """Callers of DeepSpeed's own ``allreduce_gradients`` may call it where no request is open."""
    for before, after in two_ranks.run(gradients_around_a_reduction, Setup(stage, offload=True)):
        assert before.tolist() == after.tolist() == [3.0] * before.numel()
