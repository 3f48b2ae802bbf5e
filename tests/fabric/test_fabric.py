"""Loops in Fabric: the same updates as under Fabric's DDP, and what a loop can ask for beside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from lightning.fabric import Fabric

from requestzero import AbortRequest, RequestZeRO, RequestZeROFabric
from support.ranks import RankGroup
from support.windows import ALL, ExactLayers, values

PLACES = [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
KEEP = {"zero_force_ds_cpu_optimizer": False}
MICRO_BATCHES, LR = 4, 0.5


def strategy(stage: int = 2, offload: bool = False, **options: Any) -> RequestZeROFabric:
    offloads = {"offload_optimizer": True, "offload_parameters": stage == 3} if offload else {}
    return RequestZeROFabric(stage=stage, config=KEEP, **offloads, **options)


def fabric(chosen: Any) -> Fabric:
    launched = Fabric(accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=chosen)
    launched.launch()
    return launched


def set_up(chosen: Any) -> tuple[Fabric, Any, Any]:
    launched = fabric(chosen)
    torch.manual_seed(0)
    model = ExactLayers()
    return launched, *launched.setup(model, torch.optim.SGD(model.parameters(), lr=LR))


def weights(model: Any) -> list[torch.Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [param.detach().clone() for param in model.parameters()]


def loss_of(launched: Fabric, model: Any, number: int) -> torch.Tensor:
    x, w = values(number, launched.global_rank, launched.world_size)
    loss: torch.Tensor = model(x, w, ALL)
    return loss


def accumulate(launched: Fabric, model: Any, window: int, requests_end: bool = False) -> None:
    """The backwards of a window; in ``no_backward_sync`` but for the last, as Fabric's documentation does it."""
    for k in range(MICRO_BATCHES):
        with launched.no_backward_sync(model, enabled=k < MICRO_BATCHES - 1 and not requests_end):
            launched.backward(loss_of(launched, model, 10 * window + k), model=model)


def before_nothing(launched: Fabric, model: Any, optimizer: Any) -> None:
    pass


def clip_by_norm(launched: Fabric, model: Any, optimizer: Any) -> None:
    """Several times: the gradient that is clipped already stays so."""
    for max_norm in (0.25, 4.0, float("inf")):
        launched.clip_gradients(model, optimizer, max_norm=max_norm)


def clip_by_value(launched: Fabric, model: Any, optimizer: Any) -> None:
    launched.clip_gradients(model, optimizer, clip_val=0.5)


def clip_by_another_norm(launched: Fabric, model: Any, optimizer: Any) -> None:
    launched.clip_gradients(model, optimizer, max_norm=0.5, norm_type=float("inf"))


def edit(launched: Fabric, model: Any, optimizer: Any) -> None:
    """In place, another tensor, and none, by the number of the parameter."""
    ours = isinstance(launched.strategy, RequestZeROFabric)
    with RequestZeROFabric.gradients(model) if ours else nullcontext():
        for number, parameter in enumerate(model.parameters()):
            kinds = parameter.grad.mul_(0.5), parameter.grad.clamp(-0.25, 0.25), None
            parameter.grad = kinds[number % 3]


def clip_by_torch(launched: Fabric, model: Any, optimizer: Any) -> None:
    for max_norm in (0.25, 4.0, float("inf")):
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, error_if_nonfinite=True)


def train(chosen: Any, before_step: Callable[..., None], discards: bool = False) -> list[torch.Tensor]:
    launched, model, optimizer = set_up(chosen)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for window in range(3):
        if discards:
            accumulate(launched, model, window + 5)
            optimizer.zero_grad()
        accumulate(launched, model, window, requests_end=window == 1)
        before_step(launched, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return weights(model)


def same(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("stage", "offload"), PLACES)
def test_updates_are_those_of_ddp(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    under_ddp = two_ranks.run(train, "ddp", before_nothing)
    assert same(two_ranks.run(train, strategy(stage, offload), before_nothing), under_ddp)


@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, True), (3, False)])
def test_zero_grad_discards_what_came_before(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    under_ddp = two_ranks.run(train, "ddp", before_nothing)
    assert same(two_ranks.run(train, strategy(stage, offload), before_nothing, True), under_ddp)


BY_NORM = [(*place, clip) for clip in (clip_by_norm, clip_by_torch) for place in PLACES]
BY_NORM += [(*place, clip_by_another_norm) for place in PLACES[:4]]


@pytest.mark.parametrize(("stage", "offload", "clip"), BY_NORM)
def test_clipping_by_norm(two_ranks: RankGroup, stage: int, offload: bool, clip: Callable[..., None]) -> None:
    """To the rounding of the norm: ZeRO adds up its powers in another order, and divides by it elsewhere."""
    under_ddp = two_ranks.run(train, "ddp", clip)
    for ours, theirs in zip(two_ranks.run(train, strategy(stage, offload), clip), under_ddp, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not same(under_ddp, two_ranks.run(train, "ddp", before_nothing))


@pytest.mark.parametrize("change", [clip_by_value, edit])
@pytest.mark.parametrize(("stage", "offload"), PLACES[:4])
def test_changed_gradients(two_ranks: RankGroup, stage: int, offload: bool, change: Callable[..., None]) -> None:
    under_ddp = two_ranks.run(train, "ddp", change)
    assert same(two_ranks.run(train, strategy(stage, offload), change), under_ddp)
    assert not same(under_ddp, two_ranks.run(train, "ddp", before_nothing))


def clipped_by(method: str) -> list[str]:
    """The calls that reach the clipping which the engine has had since ``setup``."""
    launched, model, optimizer = set_up(strategy())
    engine: Any = RequestZeROFabric.engine_of(model)
    engine.loop_clipping = recording = MagicMock()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # without which PyTorch's function fails
    options = {"max_norm": 1.0} if method == "of_parameters" else {"clip_val": 1.0}
    launched.clip_gradients(model, optimizer, **options)  # type: ignore[arg-type]
    return [name for name, _, _ in recording.method_calls if "__" not in name]


@pytest.mark.parametrize("method", ["of_parameters", "whole_gradients"])
def test_an_engine_has_one_clipping(two_ranks: RankGroup, method: str) -> None:
    assert two_ranks.run(clipped_by, method) == [[method]] * 2


def refusals() -> list[str]:
    launched, model, optimizer = set_up(strategy())
    three, _, _ = (part := set_up(strategy(3)))
    attempts: list[Callable[[], Any]] = [
        lambda: three.clip_gradients(part[1], part[2], max_norm=1.0, norm_type=1.0),
        lambda: launched.clip_gradients(model, optimizer, max_norm=0.0),
        lambda: three.clip_gradients(part[1], part[2], clip_val=1.0),
        lambda: RequestZeROFabric.gradients(part[1]),
        lambda: optimizer.load_state_dict({}),
        lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]}),
        lambda: launched.save("unused", {"model": model, "lr_scheduler": None}),
        lambda: RequestZeROFabric.engine_of(torch.nn.Linear(1, 1)),
    ]
    texts = []
    for attempt in attempts:
        with pytest.raises((ValueError, NotImplementedError, TypeError)) as caught:
            attempt()
        texts.append(str(caught.value))
    launched.backward(loss_of(launched, model, 1) * float("inf"))
    with pytest.raises(RuntimeError) as infinite:
        launched.clip_gradients(model, optimizer, max_norm=1.0)
    return [*texts, str(infinite.value)]


def test_what_is_refused(two_ranks: RankGroup) -> None:
    for texts in two_ranks.run(refusals):
        parts = [
            "2-norm",
            "positive",
            "stage 3",
            "safe_get_full_grad",
            "fabric.load",
            "add_param_group",
            "another name",
        ]
        parts += ["fabric.setup", "error_if_nonfinite"]
        assert all(part in text for part, text in zip(parts, texts, strict=True)), texts


def counts(normalization: str) -> tuple[list[torch.Tensor], int, int]:
    launched, model, optimizer = set_up(strategy(normalization=normalization))
    engine = RequestZeROFabric.engine_of(model)
    for k in range(MICRO_BATCHES):
        loss = loss_of(launched, model, k)
        if normalization == "token":
            engine.add_weight(2.0)
        launched.backward(loss)
    requests = engine.update_window.requests
    optimizer.step()
    return weights(model), requests, engine.applied_updates


def test_normalization_divides_in_the_step(two_ranks: RankGroup) -> None:
    start = two_ranks.run(initial)[0]
    results = {name: two_ranks.run(counts, name)[0] for name in ("sum", "mean", "token")}
    assert all(result[1:] == (MICRO_BATCHES, 1) for result in results.values())
    moved = {name: [a - b for a, b in zip(start, result[0], strict=True)] for name, result in results.items()}
    ranks = 2
    for summed, mean, token in zip(*moved.values(), strict=True):
        assert torch.equal(mean * MICRO_BATCHES, summed)
        assert torch.equal(token * (2.0 * MICRO_BATCHES * ranks), summed * ranks)


def initial() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [param.detach().clone() for param in ExactLayers().parameters()]


def two_models(chosen: Any) -> list[torch.Tensor]:
    """Both backwards before both steps: each optimizer steps its own model."""
    launched = fabric(chosen)
    torch.manual_seed(0)
    modules = [ExactLayers(), ExactLayers()]
    pairs = [launched.setup(each, torch.optim.SGD(each.parameters(), lr=LR)) for each in modules]
    for number, (model, _) in enumerate(pairs):
        launched.backward(loss_of(launched, model, number), model=model)
    for _, optimizer in pairs:
        optimizer.step()
    return [weight for model, _ in pairs for weight in weights(model)]


def test_each_optimizer_steps_its_own_model(two_ranks: RankGroup) -> None:
    assert same(two_ranks.run(two_models, strategy()), two_ranks.run(two_models, "ddp"))


def built_in_parts() -> tuple[bool, bool]:
    launched = fabric(strategy(3))
    with launched.init_module():
        model = torch.nn.Linear(4, 4)
    in_parts = model.weight.numel() == 0
    model, optimizer = launched.setup(model, torch.optim.SGD(model.parameters(), lr=LR))
    before = weights(model)
    launched.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    after = weights(model)
    return in_parts, torch.equal(before[0] - LR, after[0])


def test_a_module_of_stage_3_is_built_in_parts(two_ranks: RankGroup) -> None:
    assert two_ranks.run(built_in_parts) == [(True, True)] * 2


def scheduled(chosen: Any) -> tuple[list[torch.Tensor], float]:
    """A scheduler that ``setup`` gets too is stepped by the loop alone."""
    launched = fabric(chosen)
    torch.manual_seed(0)
    model = ExactLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    given = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    wrapped, stepped, scheduler = launched.setup(model, optimizer, scheduler=given)
    for window in range(3):
        accumulate(launched, wrapped, window)
        stepped.step()
        stepped.zero_grad()  # or DDP keeps the gradients
        scheduler.step()
    return weights(wrapped), stepped.param_groups[0]["lr"]


@pytest.mark.parametrize(("stage", "offload"), [(1, True), (2, False), (3, False)])
def test_a_scheduler_given_to_setup(two_ranks: RankGroup, stage: int, offload: bool) -> None:
    ours, theirs = two_ranks.run(scheduled, strategy(stage, offload)), two_ranks.run(scheduled, "ddp")
    assert [rate for _, rate in ours] == [rate for _, rate in theirs] == [LR / 8] * 2
    assert same([after for after, _ in ours], [after for after, _ in theirs])


def evaluated(stage: int) -> torch.Tensor:
    launched = fabric(strategy(stage))
    torch.manual_seed(0)
    model = launched.setup(torch.nn.Linear(4, 4))
    with torch.no_grad():
        result: torch.Tensor = model(torch.ones(1, 4))
    return result


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_without_an_optimizer(two_ranks: RankGroup, stage: int) -> None:
    torch.manual_seed(0)
    expected = torch.nn.Linear(4, 4)(torch.ones(1, 4))
    for result in two_ranks.run(evaluated, stage):
        torch.testing.assert_close(result, expected.detach())


def clipped_and_discarded() -> bool:
    """A norm that was asked for a window that is discarded does not clip the next one."""
    launched, model, optimizer = set_up(strategy())
    accumulate(launched, model, 0)
    launched.clip_gradients(model, optimizer, max_norm=1e-3)
    optimizer.zero_grad()
    accumulate(launched, model, 1)
    optimizer.step()
    after = weights(model)
    launched, model, optimizer = set_up(strategy())
    accumulate(launched, model, 1)
    optimizer.step()
    return same([after], [weights(model)])


def test_a_discarded_window_takes_its_clipping_with_it(two_ranks: RankGroup) -> None:
    assert two_ranks.run(clipped_and_discarded) == [True] * 2


def clipped_too_early() -> list[tuple[str, str]]:
    launched, model, optimizer = set_up(strategy())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for window in range(2):  # there is one warning
            launched.backward(loss_of(launched, model, window))
            launched.clip_gradients(model, optimizer, max_norm=1.0)
            accumulate(launched, model, window)
            optimizer.step()
    return [(str(each.message), each.filename) for each in caught if "clipped" in str(each.message)]


def test_a_backward_after_clipping_is_told_at_the_line_of_the_step(two_ranks: RankGroup) -> None:
    ((told, file),), nothing = two_ranks.run(clipped_too_early)
    assert file == __file__
    assert told.startswith("4 backward(s) came after the window's gradient was clipped: the step clips the whole sum")
    assert not nothing


def saved_and_resumed(
    stage: int, offload: bool, folder: str, inside: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """``inside``: the checkpoint is saved inside a window."""
    launched, model, optimizer = set_up(strategy(stage, offload))
    accumulate(launched, model, 0)
    optimizer.step()
    if inside:
        accumulate(launched, model, 2)
    launched.save(folder, {"model": model, "optimizer": optimizer, "window": 1})
    accumulate(launched, model, 1)
    optimizer.step()
    other, second, second_optimizer = set_up(strategy(stage, offload))
    state = {"model": second, "optimizer": second_optimizer, "window": 0}
    other.load(folder, state)
    accumulate(other, second, state["window"])
    second_optimizer.step()
    return weights(model), weights(second), state["window"]


@pytest.mark.parametrize(
    ("stage", "offload", "inside"), [(1, True, False), (2, False, True), (2, True, True), (3, True, False)]
)
def test_resume(two_ranks: RankGroup, tmp_path: Path, stage: int, offload: bool, inside: bool) -> None:
    for first, second, window in two_ranks.run(saved_and_resumed, stage, offload, str(tmp_path / "saved"), inside):
        assert same([first], [second])
        assert window == 1


def run_requests(launched: Fabric, model: Any, numbers: range, bad: int | None = None) -> None:
    """Requests of two micro-batches; rank 1 aborts the bad one."""
    engine = RequestZeROFabric.engine_of(model)
    for number in numbers:
        with engine.request(number):
            for part in range(2):
                launched.backward(loss_of(launched, model, 10 * number + part), model=model)
            if number == bad and launched.global_rank == 1:
                raise AbortRequest("its reward came too late")


def aborted(stage: int, offload: bool, folder: str) -> tuple[list[list[torch.Tensor]], list[Any], int]:
    """Abort the second of four requests, and save after it: weights with it, without it and resumed; names; count."""
    found = []
    for bad in (1, None):
        launched, model, optimizer = set_up(strategy(stage, offload, abort=True))
        engine = RequestZeROFabric.engine_of(model)
        run_requests(launched, model, range(1))
        if bad is not None:
            run_requests(launched, model, range(1, 2), bad)
            launched.save(folder, {"model": model, "optimizer": optimizer})
        run_requests(launched, model, range(2, 4))
        names = list(engine.update_window.request_ids)
        optimizer.step()
        found.append(weights(model))
    launched, model, optimizer = set_up(strategy(stage, offload, abort=True))
    launched.load(folder, {"model": model, "optimizer": optimizer})
    run_requests(launched, model, range(2, 4))
    optimizer.step()
    return [*found, weights(model)], names, RequestZeROFabric.engine_of(model).aborted_requests


@pytest.mark.parametrize(("stage", "offload"), [(1, True), (2, False), (3, False)])
def test_a_request_is_aborted_and_its_window_saved(
    two_ranks: RankGroup, tmp_path: Path, stage: int, offload: bool
) -> None:
    for (with_bad, without, resumed), names, counted in two_ranks.run(aborted, stage, offload, str(tmp_path / "saved")):
        assert same([with_bad, resumed], [without, without])
        assert (names, counted) == ([0, 2, 3], 1)
        assert not same([with_bad], [two_ranks.run(initial)[0]])


def alone_in_a_save(folder: str) -> str:
    from requestzero import RankDisagreementError

    launched, model, _ = set_up(strategy())
    loss = loss_of(launched, model, 0)
    with pytest.raises(RankDisagreementError) as caught:
        launched.save(folder, {"model": model}) if launched.global_rank == 0 else launched.backward(loss)
    return str(caught.value)


def test_a_rank_alone_in_a_save_is_an_error_on_all(tmp_path: Path) -> None:
    ranks = RankGroup(2)
    try:
        texts = ranks.run(alone_in_a_save, str(tmp_path / "saved"))
    finally:
        ranks.stop()
    assert texts[0] == texts[1]
    assert "fabric.save" in texts[0]


def closure_result(chosen: Any) -> tuple[float, list[torch.Tensor]]:
    launched, model, optimizer = set_up(chosen)

    def closure() -> torch.Tensor:
        loss = loss_of(launched, model, 3)
        launched.backward(loss)
        return loss

    return float(optimizer.step(closure)), weights(model)


def test_a_closure_runs_before_the_step(two_ranks: RankGroup) -> None:
    ours, theirs = two_ranks.run(closure_result, strategy()), two_ranks.run(closure_result, "ddp")
    assert [value for value, _ in ours] == [value for value, _ in theirs]
    assert same([after for _, after in ours], [after for _, after in theirs])


def by_name(name: str) -> tuple[int, bool]:
    import requestzero.fabric  # noqa: F401 (registers the names)

    chosen: Any = Fabric(accelerator="cpu", devices=1, strategy=name).strategy
    return chosen.settings.stage, chosen.settings.offload_optimizer


@pytest.mark.parametrize(("stage", "offload"), PLACES)
def test_names(stage: int, offload: bool) -> None:
    assert by_name(f"request_zero_{stage}" + "_offload" * offload) == (stage, offload)


def test_the_strategy_of_the_trainer_says_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"requestzero\.RequestZeROFabric"):
        Fabric(accelerator="cpu", devices=1, strategy=RequestZeRO())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"incomplete_window": "drop"}, "RequestZeROFabric has no option 'incomplete_window'"),
        ({"config": {"gradient_accumulation_steps": 4}}, "call optimizer.step"),
        ({"stage": 1, "config": {"zero_optimization": {"stage": 2}}}, "the arguments of RequestZeROFabric"),
        ({"retain_gpu_grad_partition_until_step": True}, "does not apply without optimizer offload"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        RequestZeROFabric(**options)
