"""``normalization="token"``: the window's total loss over all ranks, divided by its total weight, however it is cut."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from requestzero.probe.counters import Operators
from support.engines import build, masters, module_weights
from support.fp16 import fp16_where_needed
from support.grid import PLACES, every_place
from support.muon import batch, build_muon, momentum
from support.overflow_configs import STATIC_FP16, UNCHECKED_BF16
from support.ranks import RankGroup
from support.sequences import RANKS, SIZES, Sequence, Sliced, cut, draw, reference, run_window
from support.setup import Setup

LR, MOMENTUM = 0.5, 0.5
DTYPES = [("fp32", "fp32", {}), ("bf16", "fp32", {}), ("bf16", "bf16", {})]
FP16 = ("fp16", "fp32", STATIC_FP16)


def build_sliced(setup: Setup) -> Any:
    return build(setup, model=Sliced(), lr=LR, momentum=MOMENTUM)


def flat(engine: Any) -> torch.Tensor:
    return torch.cat([master.flatten() for master in masters(engine)])


# --- invariance -----------------------------------------------------------------------------------------------------

WINDOWS = [
    draw(1, 24),
    draw(2, 24),
    [Sequence((12,) * sum(SIZES), 0)],  # a total weight of zero: nothing happens, whatever the gradient
    draw(1, 24),  # the first one's sequences, cut in another way
    draw(3, 96),
]


def invariant(setup: Setup, windows: list[list[Sequence]], cuts: int) -> list[torch.Tensor]:
    """The weights after each window; windows are cut by seeds that differ from window to window and call to call."""
    import deepspeed.comm as dist

    found = []
    with fp16_where_needed(setup.model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = build_sliced(setup)
        for number, window in enumerate(windows):
            requests = cut(window, dist.get_world_size(), 100 * cuts + number)
            run_window(engine, requests, dist.get_rank(), as_tensor=bool(number % 2))
            engine.step(normalization="token")
            weight = sum(s.tokens for s in window)
            gradient = torch.tensor([s.values for s in window]).sum(0).double() / max(weight, 1)
            assert engine.was_step_applied() is (weight > 0)
            if weight:
                assert float(engine.get_global_grad_norm()) == pytest.approx(float(gradient.norm()), rel=1e-6)
            assert not engine.update_window.is_open
            found.append(flat(engine))
        assert (engine.empty_updates, engine.applied_updates, engine.skipped_steps) == (1, len(windows) - 1, 0)
        engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_the_update_does_not_depend_on_the_cut(ranks: int, group_of: Callable[[int], RankGroup]) -> None:
    """Bit for bit: stages, offload, dtypes, requests, micro-batches, ranks, order, fillers, empty requests."""
    wanted = reference(WINDOWS, LR, MOMENTUM)
    for number, (model, accum, config) in enumerate([*DTYPES, FP16]):
        for place, (stage, offload) in enumerate(PLACES):
            setup = Setup(stage=stage, offload=offload, model=model, accum=accum, config=config)
            for rank, found in enumerate(group_of(ranks).run(invariant, setup, WINDOWS, 4 * number + place)):
                for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
                    assert torch.equal(a, b), f"{setup} rank {rank} window {index}"


def mean_of_means(setup: Setup, window: list[Sequence]) -> list[bool]:
    """The average of the micro-batches' means, right for equal weights only: true where it equals the reference."""
    import deepspeed.comm as dist

    wanted, rank, found = reference([window], LR, MOMENTUM)[0], dist.get_rank(), []
    for seed in range(3):
        engine = build_sliced(setup)
        for rounds in cut(window, dist.get_world_size(), seed):
            for position, micros in enumerate(rounds):
                engine.set_gradient_accumulation_boundary(position == len(rounds) - 1)
                values = torch.tensor([s.values for s in micros[rank]] or [[0] * sum(SIZES)]).sum(0).float()
                engine.backward(engine(values.to(engine.device)) / max(1, sum(s.tokens for s in micros[rank])))
        engine.step(normalization="mean")
        found.append(torch.equal(flat(engine), wanted))
        engine.destroy()
    return found


def test_the_comparison_can_fail(two_ranks: RankGroup) -> None:
    assert two_ranks.run(mean_of_means, Setup(), WINDOWS[0]) == [[False] * 3] * 2


def power_of_two(total: int) -> None:
    """Three ranks and a total that three does not divide: mean over ranks and divisor are rounded, once each."""
    import deepspeed.comm as dist

    window = draw(5, total)
    engine = build_sliced(Setup())
    run_window(engine, cut(window, dist.get_world_size(), 1), dist.get_rank(), True)
    engine.step(normalization="token")
    torch.testing.assert_close(flat(engine), reference([window], LR, MOMENTUM)[0], rtol=2**-23, atol=0)
    engine.destroy()


def test_three_ranks_round_a_total_that_three_does_not_divide(three_ranks: RankGroup) -> None:
    three_ranks.run(power_of_two, 32)


def ways_of_averaging(config: dict[str, Any], zero: dict[str, Any]) -> bool:
    """DeepSpeed's options for the reduction's own division."""
    import deepspeed.comm as dist

    window = draw(6, 48)
    engine = build_sliced(Setup(config=config, zero=zero))
    run_window(engine, cut(window, dist.get_world_size(), 2), dist.get_rank(), False)
    engine.step(normalization="token")
    result = torch.equal(flat(engine), reference([window], LR, MOMENTUM)[0])
    engine.destroy()
    return result


@pytest.mark.parametrize(
    ("config", "zero"),
    [
        ({"gradient_allreduce_op": "sum"}, {}),
        ({"gradient_allreduce_op": "sum"}, {"reduce_scatter": False}),
        ({"prescale_gradients": True}, {"reduce_scatter": False}),
        ({"gradient_predivide_factor": 2.0}, {"reduce_scatter": False}),
        ({"gradient_predivide_factor": 0.5}, {"stage": 1}),
        ({"managed_gradient_accumulation": True}, {"compute_grad_norm": False}),
        ({}, {"round_robin_gradients": True}),
    ],
)
def test_however_deepspeed_averages(two_ranks: RankGroup, config: dict[str, Any], zero: dict[str, Any]) -> None:
    assert two_ranks.run(ways_of_averaging, config, zero) == [True] * 2


# --- a real model ---------------------------------------------------------------------------------------------------


def texts() -> list[tuple[torch.Tensor, int]]:
    """Token ids of 14 texts of 2 to 16 tokens, and from which on they are trained on."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 17, (14,), generator=generator).tolist()
    return [(torch.randint(0, 256, (n,), generator=generator), n // 4) for n in lengths]


def decoder() -> torch.nn.Module:
    from requestzero.recipes.model import ByteDecoder

    torch.manual_seed(0)
    model = ByteDecoder(258, 16, 2, 2, longest=16)
    return model


def collate(rows: list[tuple[torch.Tensor, int]], filler: bool = False) -> dict[str, torch.Tensor]:
    from torch.nn.utils.rnn import pad_sequence

    labels = [torch.where(torch.arange(len(ids)) < max(first, 1 + 99 * filler), -100, ids) for ids, first in rows]
    ids = pad_sequence([ids for ids, _ in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def trained_decoder(setup: Setup, seed: int, normalization: str = "token") -> torch.Tensor:
    """Weights after one update of plain SGD over all texts, cut at random."""
    import random

    import deepspeed.comm as dist

    from requestzero.recipes.model import next_token_loss

    generator, rank, world = random.Random(seed), dist.get_rank(), dist.get_world_size()
    engine = build(setup, model=decoder(), lr=1.0)
    waiting = generator.sample(texts(), 14)
    while waiting:
        shares = [[waiting.pop() for _ in range(min(len(waiting), generator.randint(0, 3)))] for _ in range(world)]
        if not any(shares):
            continue
        inputs = collate(shares[rank] or shares[0] or shares[-1], filler=not shares[rank])
        total, tokens = next_token_loss(engine, {name: value.to(engine.device) for name, value in inputs.items()})
        engine.set_gradient_accumulation_boundary(generator.random() < 0.5)
        engine.backward(total / tokens.clamp(min=1) if normalization == "mean" else total, weight=tokens)
    engine.end_request()
    engine.set_gradient_accumulation_boundary(True)
    engine.step(normalization=normalization)
    result = flat(engine)
    engine.destroy()
    return result


def plain_decoder() -> torch.Tensor:
    """All texts in one batch, in fp64."""
    from requestzero.recipes.model import next_token_loss

    model = decoder().double()
    total, tokens = next_token_loss(model, collate(texts()))
    (total / tokens).backward()
    return torch.cat([(p.detach() - p.grad).flatten() for p in model.parameters() if p.grad is not None])


def test_a_real_model_within_rounding(one_rank: RankGroup, two_ranks: RankGroup, three_ranks: RankGroup) -> None:
    """fp32: within 1e-6 of the update that one batch in fp64 makes, whose largest entry is above 0.1."""
    wanted = plain_decoder().float()
    assert (wanted - torch.cat([p.detach().flatten() for p in decoder().parameters()])).abs().max() > 0.1
    setups = [Setup(), Setup(stage=1, offload=True)]
    for seed, (group, setup) in enumerate((g, s) for g in (one_rank, two_ranks, three_ranks) for s in setups):
        for found in group.run(trained_decoder, setup, seed):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    wrong = two_ranks.run(trained_decoder, Setup(), 0, "mean")[0]
    assert (wrong - wanted).abs().max() > 1e-3, "the mean of means is another update"


# --- norm and clipping ----------------------------------------------------------------------------------------------


def clipped(setup: Setup, clip: float) -> None:
    import deepspeed.comm as dist

    window = draw(1, 24)
    engine = build_sliced(setup)
    run_window(engine, cut(window, dist.get_world_size(), 3), dist.get_rank(), True)
    engine.step(normalization="token")
    gradient = torch.tensor([s.values for s in window]).sum(0).double() / 24
    assert float(gradient.norm()) > 2 * clip
    assert float(engine.get_global_grad_norm()) == pytest.approx(float(gradient.norm()), rel=1e-6)
    wanted = gradient * clip / float(gradient.norm())
    torch.testing.assert_close(-flat(engine).double() / LR, wanted, rtol=1e-5, atol=1e-6)
    engine.destroy()


@every_place
def test_clipping_and_norm_refer_to_the_divided_gradient(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    for model, accum, config in [*DTYPES, FP16][:2]:
        two_ranks.run(clipped, Setup(stage, offload, model, accum, config={**config, "gradient_clipping": 0.25}), 0.25)


def muon(stage: int, offload: bool, by_weight: bool) -> list[torch.Tensor]:
    """Two updates with Muon: weights 3 and 5 of each rank's two micro-batches, or their sum given as the divisor."""
    engine = build_muon(stage, offload, "fp32", "fp32")
    for step in range(2):
        for request, weight in enumerate((3, 5)):
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(batch(engine, step, request)), weight=weight)
        engine.step(**({"normalization": "token"} if by_weight else {"divisor": 8.0}))
    result = module_weights(engine) + momentum(engine)
    engine.destroy()
    return result


@every_place
def test_muon_gets_the_divided_sum(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    given, found = (two_ranks.run(muon, stage, offload, by_weight)[0] for by_weight in (False, True))
    assert len(found) > 6
    assert all(map(torch.equal, given, found))


# --- a total weight of zero -----------------------------------------------------------------------------------------


def empty_window(setup: Setup) -> tuple[int, list[str]]:
    """Weights, optimizer state and schedule stay; the warning comes once."""
    engine = build_sliced(setup)
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer.optimizer, 1, gamma=0.5)
    run_window(engine, cut(draw(1, 24), 2, 1), engine.global_rank, True)
    engine.step(normalization="token")

    def state() -> list[Any]:
        tensors = [v.clone() for values in engine.optimizer.optimizer.state.values() for v in values.values()]
        return [flat(engine), *tensors], engine.get_lr(), engine.global_steps, engine.skipped_steps

    tensors, *counters = state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run_window(engine, cut([Sequence((12,) * sum(SIZES), 0)] * 3, 2, 1), engine.global_rank, True)
            engine.step(normalization="token")
            assert not engine.was_step_applied()
            assert float(engine.get_global_grad_norm()) == 0.0
            assert not engine.update_window.is_open
    after, *counters_after = state()
    assert len(after) == 2
    assert all(map(torch.equal, tensors, after))
    assert counters == counters_after
    assert engine.grad_partition_bytes == 0
    messages = [str(w.message) for w in caught if "total weight" in str(w.message)]
    result = engine.empty_updates, messages
    engine.destroy()
    return result


@every_place
def test_a_window_of_zero_weight_is_skipped_and_counted(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    results = two_ranks.run(empty_window, Setup(stage=stage, offload=offload, model="bf16", accum="fp32"))
    assert [count for count, _ in results] == [2, 2]
    assert len(results[0][1]) == 1
    assert "there is nothing to divide by, so it is skipped" in results[0][1][0]
    assert results[1][1] == []


def test_the_count_is_kept_in_a_checkpoint() -> None:
    from requestzero.zero.overflow.skips import SkipRecord

    assert SkipRecord.from_state(SkipRecord(empty=2).state_dict()).empty == 2


# --- what it costs --------------------------------------------------------------------------------------------------


def costs(setup: Setup, by_weight: bool) -> tuple[list[int], int, int]:
    """Host reads of each backward and of the step, and collectives of the step."""
    engine, backwards = build_sliced(setup), []
    for end in (False, True, True):
        engine.set_gradient_accumulation_boundary(end)
        ones = torch.ones(sum(SIZES), device=engine.device, dtype=next(engine.module.parameters()).dtype)
        loss, weight = engine(ones), torch.tensor(3, device=engine.device)
        with Operators() as operators:
            engine.backward(loss, **({"weight": weight} if by_weight else {}))
        backwards.append(operators.host_reads)
    with Operators() as operators:
        engine.step(**({"normalization": "token"} if by_weight else {"divisor": 1.5}))
    collectives = sum(count for name, count in operators.counts.items() if name.startswith("c10d"))
    engine.destroy()
    return backwards, operators.host_reads, collectives


@every_place
def test_a_weight_costs_no_host_read_and_no_collective(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    for model, config in {"bf16": {}, "fp32": {"gradient_clipping": 1.0}}.items():
        setup = Setup(stage=stage, offload=offload, model=model, config=config)
        without, with_weight = (two_ranks.run(costs, setup, by_weight)[0] for by_weight in (False, True))
        assert with_weight == without
        assert without[:2] == ([0, 0, 0], 1)
        assert without[2] >= 1


def test_unchecked_gradients_cost_the_one_read_of_the_weight(two_ranks: RankGroup) -> None:
    for setup in (Setup(model="bf16", accum="fp32", config=UNCHECKED_BF16), Setup()):
        (backwards, reads, collectives), _ = two_ranks.run(costs, setup, True)
        assert (backwards, reads) == ([0, 0, 0], 1)
        assert two_ranks.run(costs, setup, False)[0] == ([0, 0, 0], 0, collectives)


def unchecked_overflow(setup: Setup, division: dict[str, Any]) -> tuple[bool, bool]:
    engine = build_sliced(setup)
    ones = torch.ones(sum(SIZES), device=engine.device, dtype=next(engine.module.parameters()).dtype)
    engine.backward(engine(ones * float("nan")), weight=3)
    engine.step(**division)
    result = engine.was_step_applied(), bool(flat(engine).isnan().all())
    engine.destroy()
    return result


@every_place
def test_unchecked_gradients_are_applied_all_the_same(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    unchecked = {"overflow": {"check_grad_overflow": False}}
    for setup in (
        Setup(stage, offload, config=unchecked),
        Setup(stage, offload, "bf16", "fp32", config=UNCHECKED_BF16),
    ):
        for division in ({"normalization": "token"}, {"divisor": 3.0}):
            assert two_ranks.run(unchecked_overflow, setup, division) == [(True, True)] * 2


def dropped(setup: Setup, how: str) -> None:
    """``on_overflow="drop_request"``: the dropped request's weight goes with it, its last micro-batch's included."""
    import deepspeed.comm as dist

    window = draw(7, 24)
    engine, rounds = build_sliced(setup), cut(window, dist.get_world_size(), 1)
    run_window(engine, rounds[:1], dist.get_rank(), how == "tensor")
    for end in (False, True):
        engine.set_gradient_accumulation_boundary(end)
        loss = engine(torch.full((sum(SIZES),), float("inf") if end else 1.0, device=engine.device))
        if how == "torch":
            engine.add_weight(50)
            loss.backward()
        else:
            engine.backward(loss, weight=torch.tensor(50) if how == "tensor" else 50)
    assert engine.dropped_requests == 1
    run_window(engine, rounds[1:], dist.get_rank(), how == "tensor")
    engine.step(normalization="token")
    assert torch.equal(flat(engine), reference([window], LR, MOMENTUM)[0])
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(torch.full((sum(SIZES),), float("nan"), device=engine.device)), weight=3)
    engine.step(normalization="token")  # nothing is left of the window: an overflow, not an empty window
    assert (engine.skipped_updates, engine.empty_updates, engine.applied_updates) == (1, 0, 1)
    engine.destroy()


@pytest.mark.parametrize("how", ["number", "tensor", "torch"])
def test_a_dropped_request_takes_its_weight_with_it(two_ranks: RankGroup, how: str) -> None:
    policy = {"overflow": {"on_overflow": "drop_request", "check_grad_overflow": True}}
    for stage, offload in PLACES[how == "torch" :: 2]:
        two_ranks.run(dropped, Setup(stage, offload, config=policy), how)


# --- errors ---------------------------------------------------------------------------------------------------------


def wrong_weights(weights: list[list[Any]], setup: Setup) -> str:
    """A window of two micro-batches with the weights of each rank; the window can be mended or discarded after it."""
    engine = build_sliced(setup)
    for value in weights[engine.global_rank]:
        if value == "backward":
            engine.backward(engine(torch.ones(sum(SIZES), device=engine.device)))
        else:
            engine.add_weight(value)
    with pytest.raises(RuntimeError) as caught:
        engine.step(normalization="token")
    assert engine.update_window.is_open
    engine.zero_grad()
    assert engine.update_window.weights.reported == 0
    run_window(engine, cut(draw(1, 24), 2, 1), engine.global_rank, True)
    engine.step(normalization="token")
    assert torch.equal(flat(engine), reference([draw(1, 24)], LR, MOMENTUM)[0])
    engine.destroy()
    return str(caught.value)


B = "backward"
GOOD = [B, 1.0, B, 2.0]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[B, B], [B, B]], "but 4 over all ranks have none or more than one .this rank: 0 weights for 2 micro-batches"),
        ([GOOD, [B, 1.0, B]], "but 1 over all ranks have none or more than one"),
        ([[B, 1.0, 2.0, B, 3.0], GOOD], "but 1 over all ranks have none or more than one"),
        (
            [GOOD, [B, torch.tensor(-1.0), B, 5.0]],
            "add up to nan over all ranks: a weight is negative, infinite or NaN",
        ),
        ([[B, torch.tensor(float("nan")), B, 5.0], GOOD], "add up to nan over all ranks"),
        ([GOOD, [B, torch.tensor(float("inf")), B, 5.0]], "add up to inf over all ranks"),
    ],
)
def test_weights_that_cannot_be_used_are_an_error_on_all_ranks(
    two_ranks: RankGroup, weights: list[list[Any]], message: str
) -> None:
    for found in two_ranks.run(wrong_weights, weights, Setup(), timeout=60):
        assert pytest.raises(RuntimeError, match=message).matches(RuntimeError(found)), found


def different_ways() -> str:
    import deepspeed.comm as dist

    engine = build_sliced(Setup(config={"gradient_clipping": 1.0}))
    for _ in range(2):
        engine.backward(engine(torch.ones(sum(SIZES), device=engine.device)), weight=50)
    with pytest.raises(RuntimeError) as caught:
        engine.step(normalization="token" if dist.get_rank() else "mean")
    engine.destroy()
    return str(caught.value)


def test_ranks_that_divide_in_different_ways_are_an_error_on_all_of_them(two_ranks: RankGroup) -> None:
    messages = two_ranks.run(different_ways, timeout=60)
    assert "The ranks divide the update window by different numbers" in messages[0]
    assert "normalization='token' divides by the weights" in messages[1]


def wrong_calls() -> list[str]:
    messages = []

    def attempt(call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=r"allowed|give one of them|divides once") as caught:
            call(*args, **kwargs)
        messages.append(str(caught.value))

    engine = build_sliced(Setup())
    loss = engine(torch.ones(sum(SIZES), device=engine.device))
    for weight in (-1, float("nan"), float("inf"), True, "3", torch.ones(2), torch.tensor(True)):
        attempt(engine.backward, loss, weight=weight)
    attempt(engine.add_weight, -2.0)
    engine.backward(loss, weight=2)
    attempt(engine.step, normalization="tokens")
    attempt(engine.step, divisor=2.0, normalization="token")
    assert engine.update_window.micro_batches == 1
    engine.destroy()
    engine = build_sliced(Setup(config={"gradient_accumulation_steps": 4}))
    engine.backward(engine(torch.ones(sum(SIZES), device=engine.device)), weight=2)
    attempt(engine.step, normalization="token")
    engine.destroy()
    return messages


def test_wrong_calls_are_errors_at_once(one_rank: RankGroup) -> None:
    given = ["-1", "nan", "inf", "True", "'3'", "a tensor of shape [2]", "a tensor of shape [] and dtype bool", "-2.0"]
    messages = one_rank.run(wrong_calls)[0]
    for value, message in zip(given, messages[: len(given)], strict=True):
        assert message.startswith(f"weight={value}")
        assert "use a finite number of at least 0" in message
    others = messages[len(given) :]
    assert "normalization='tokens' is not allowed: use one of 'mean', 'sum', 'token'" in others[0]
    assert "step() got divisor=2.0 and normalization='token', which chooses the divisor: give one" in others[1]
    assert "gradient_accumulation_steps=4 makes DeepSpeed divide every loss too: set it to 1" in others[2]


def torch_style(normalization: str) -> torch.Tensor:
    """``loss.backward()`` with ``add_weight`` before it, and a window that was discarded in between."""
    engine = build_sliced(Setup())
    ones = torch.ones(sum(SIZES), device=engine.device)
    engine.add_weight(7)
    engine(ones * 99).backward()
    engine.zero_grad()
    for value, weight in ((1.0, 1), (2.0, torch.tensor([3.0]))):
        engine.set_gradient_accumulation_boundary(True)
        engine.add_weight(weight)
        engine(ones * value).backward()
    engine.step(normalization=normalization)
    result = -flat(engine) / LR
    engine.destroy()
    return result


def test_weights_with_torchs_own_backward(two_ranks: RankGroup) -> None:
    for normalization, wanted in {"token": 6 / 8, "mean": 3 / 2, "sum": 3.0}.items():
        for found in two_ranks.run(torch_style, normalization):
            assert torch.equal(found, torch.full_like(found, wanted)), normalization
