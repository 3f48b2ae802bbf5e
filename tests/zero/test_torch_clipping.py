"""PyTorch's functions that clip, for parameters whose gradients an engine keeps, and for all others."""

from __future__ import annotations

import warnings
from typing import Any, cast
from weakref import WeakValueDictionary

import pytest
import torch
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_

import requestzero
from requestzero.zero.clipping import LoopClipping
from requestzero.zero.engine import torch_clipping
from requestzero.zero.engine.torch_clipping import leave, serve
from support.engines import build, module_weights
from support.failures import assert_fails
from support.ranks import RankGroup
from support.setup import Setup
from support.windows import ALL, LR, ExactLayers, Micro, backward, reference

LIMIT = 0.125


def built(setup: Setup) -> Any:
    """An engine in the middle of a window, in a loop that divides by two."""
    engine = build(setup)

    def prepare_step(call: str) -> dict[str, float]:
        engine.end_request()
        return {"divisor": 2.0}

    engine.loop_clipping = LoopClipping(engine, prepare_step, configured=None)
    backward(engine, Micro(ALL, 1))
    backward(engine, Micro(ALL, 2))
    return engine


def window_of_plain() -> ExactLayers:
    """The same gradient in ``param.grad``, from plain PyTorch."""
    import deepspeed.comm as dist

    torch.manual_seed(0)
    model = ExactLayers()
    (gradients,) = reference([[Micro(ALL, 1), Micro(ALL, 2)]], dist.get_world_size())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.float() / 2
    return model


def all_by_norm(*models: torch.nn.Module) -> Any:
    return clip_grad_norm_([parameter for model in models for parameter in model.parameters()], LIMIT)


def all_by_another_norm(*models: torch.nn.Module) -> Any:
    return clip_grad_norm_([parameter for model in models for parameter in model.parameters()], LIMIT, norm_type=1.0)


def all_by_value(*models: torch.nn.Module) -> Any:
    clip_grad_value_((parameter for model in models for parameter in model.parameters()), LIMIT)


def first_by_norm(*models: torch.nn.Module) -> Any:
    return clip_grad_norm_(next(models[0].parameters()), LIMIT, 2.0, True, False)  # all that PyTorch takes


def of_two_models(*models: torch.nn.Module) -> Any:
    other = torch.nn.Linear(2, 2)
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    return all_by_norm(*models, other)


def all_twice(*models: torch.nn.Module) -> Any:
    return [all_by_norm(*models), clip_grad_norm_(models[0].parameters(), LIMIT / 2)]


def all_and_then_by_value(*models: torch.nn.Module) -> Any:
    norm = all_by_norm(*models)
    clip_grad_value_(models[0].parameters(), LIMIT / 8)
    return norm


def all_and_then_first(*models: torch.nn.Module) -> Any:
    return [all_by_norm(*models), clip_grad_norm_(next(models[0].parameters()), LIMIT / 8)]


CLIPS = [all_by_norm, all_by_another_norm, all_by_value, first_by_norm, of_two_models]
SEVERAL = [all_twice, all_and_then_by_value, all_and_then_first]


def clipped(setup: Setup, clip: Any) -> tuple[Any, Any]:
    """Norm and weights with an engine, and with plain PyTorch."""
    engine, plain = built(setup), window_of_plain()
    norms = [clip(model) for model in (engine.module, plain)]
    engine.step(divisor=2.0)
    with torch.no_grad():
        expected = [weight - LR * weight.grad for weight in plain.parameters()]
    result = ([norms[0], *module_weights(engine)], [norms[1], *expected])
    engine.destroy()
    return result


@pytest.mark.parametrize("clip", [*CLIPS, *SEVERAL])
@pytest.mark.parametrize("stage", [1, 2])
def test_they_clip_as_in_plain_pytorch(two_ranks: RankGroup, stage: int, clip: Any) -> None:
    for ours, plain in two_ranks.run(clipped, Setup(stage=stage), clip):
        torch.testing.assert_close(ours, plain)


def test_stage_3_clips_all_parameters_by_their_norm(two_ranks: RankGroup) -> None:
    for clip in (all_by_norm, all_twice):
        for ours, plain in two_ranks.run(clipped, Setup(stage=3), clip):
            torch.testing.assert_close(ours, plain)
    for clip in (all_by_value, first_by_norm):
        assert_fails(two_ranks, "^NotImplementedError: torch.nn.utils.clip_grad_", clipped, Setup(stage=3), clip)


def without_a_loop() -> None:
    engine = build(Setup())
    clip_grad_norm_(engine.module.parameters(), LIMIT)  # nothing is pending, so that it is PyTorch's own
    backward(engine, Micro(ALL, 1))
    clip_grad_norm_(engine.module.parameters(), LIMIT)


def by_a_norm_of_nothing() -> None:
    engine = built(Setup())
    clip_grads_with_norm_(engine.module.parameters(), LIMIT, torch.tensor(0.0))


def of_a_gradient_that_is_not_finite() -> None:
    engine = built(Setup())
    backward(engine, Micro(ALL, 3), factor=float("inf"))
    clip_grad_norm_(engine.module.parameters(), LIMIT, error_if_nonfinite=True)


def without_norms() -> None:
    engine = built(Setup(zero={"compute_grad_norm": False}))
    assert float(clip_grad_norm_(engine.module.parameters(), float("inf"))) > 0
    clip_grad_norm_(engine.module.parameters(), LIMIT)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (without_norms, "^ValueError: torch.nn.utils.clip_grad_norm_ and zero_optimization.compute_grad_norm=false "),
        (without_a_loop, "^RuntimeError: torch.nn.utils.clip_grad_norm_ got parameters .*: set gradient_clipping"),
        (by_a_norm_of_nothing, "^RuntimeError: torch.nn.utils.clip_grads_with_norm_: .* use clip_grad_norm_"),
        (of_a_gradient_that_is_not_finite, "^RuntimeError: torch.nn.utils.clip_grad_norm_: the norm .* is (inf|nan)"),
    ],
)
def test_what_cannot_be_clipped_is_an_error(two_ranks: RankGroup, program: Any, message: str) -> None:
    assert_fails(two_ranks, message, program)


def without_weight() -> tuple[float, bool]:
    """The norm, and whether the step applied anything, of a window of which no token is trained."""
    engine = build(Setup())

    def prepare_step(call: str) -> dict[str, str]:
        engine.end_request()
        return {"normalization": "token"}

    engine.loop_clipping = LoopClipping(engine, prepare_step, configured=None)
    engine.add_weight(0.0)
    backward(engine, Micro(ALL, 1))
    norm = float(clip_grad_norm_(engine.module.parameters(), LIMIT, norm_type=float("inf")))
    engine.step(normalization="token")
    return norm, engine.was_step_applied()


def test_a_window_without_weight_has_nothing_to_clip(two_ranks: RankGroup) -> None:
    assert two_ranks.run(without_weight) == [(0.0, False)] * 2


def others_beside(setup: Setup) -> list[bool]:
    """With an engine in the middle of a window: other parameters, and after the engine is gone its own."""
    engine = built(setup)
    other = torch.nn.Linear(2, 1, bias=False)
    other.weight.grad = torch.tensor([[3.0, 4.0]])
    norm = clip_grad_norm_(other.parameters(), 1.0)
    right = [float(norm) == 5.0, torch.allclose(other.weight.grad, torch.tensor([[0.6, 0.8]]))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clip_grad_norm_((parameter for parameter in ()), 1.0)
    right.append(any("empty generator" in str(each.message) for each in caught))
    right.append(engine.next_step_clipping.asked(engine.update_window) is None)
    parameters = list(engine.module.parameters())
    engine.destroy()
    return [*right, float(clip_grad_norm_(parameters, 1.0)) == 0.0]


def test_other_parameters_are_left_to_pytorch(one_rank: RankGroup) -> None:
    assert one_rank.run(others_beside, Setup()) == [[True] * 5]


class WithLocal(torch.nn.Module):
    """Trains a parameter beside the optimizer, with another gradient on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.local = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum() + self.local.sum() * (1000.0 + torch.distributed.get_rank())


def clipped_beside_local(stage: int, norm_type: float) -> tuple[float, list[float]]:
    model = WithLocal()
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    config = Setup(stage=stage).deepspeed_config(requestzero=True)
    engine: Any = requestzero.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.loop_clipping = LoopClipping(engine, lambda call: {"divisor": 1.0}, configured=None)
    engine.backward(engine(torch.tensor([3.0, 0.0, 0.0, 4.0])))
    norm = float(clip_grad_norm_(model.parameters(), 1.0, norm_type=norm_type))
    engine.step()
    found = norm, model.weight.tolist()
    engine.destroy()
    return found


@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 5.0), (1.0, 7.0)])
def test_gradients_of_one_rank_alone_take_no_part(two_ranks: RankGroup, norm_type: float, norm: float) -> None:
    for stage in (1, 2):
        for found, weight in two_ranks.run(clipped_beside_local, stage, norm_type):
            assert found == pytest.approx(norm)
            assert weight == pytest.approx([-3.0 / norm, 0.0, 0.0, -4.0 / norm], rel=1e-5)


def aborted_after_clipping() -> tuple[float | None, float | None]:
    engine = build(Setup(config={"requestzero": {"abort": True}}))
    backward(engine, Micro(ALL, 1))
    window = engine.update_window
    engine.next_step_clipping.ask(window, LIMIT)
    before = engine.next_step_clipping.asked(window)
    engine.abort_request("it was bad")
    backward(engine, Micro(ALL, 2))
    after = engine.next_step_clipping.asked(engine.update_window)
    assert engine.update_window is window
    engine.destroy()
    return before, after


def test_a_clip_is_forgotten_with_the_requests_that_it_was_for(two_ranks: RankGroup) -> None:
    assert two_ranks.run(aborted_after_clipping) == [(LIMIT, None)] * 2


def test_of_an_unknown_function_a_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip_grad, "clip_grad_norm_", lambda *_: None)
    monkeypatch.setattr(clip_grad, "clip_grad_value_", lambda *_: None)
    monkeypatch.setattr(clip_grad, "_clip_grads_with_norm_", lambda *_: None)
    with pytest.warns(UserWarning, match=r"clip_grad\w* of PyTorch .* does nothing") as caught:
        torch_clipping._install()
    assert len(caught) == 3
    assert {warning.filename for warning in caught} == {__file__}


def closure_over(value: Any) -> Any:
    return lambda *_: value


def test_the_cells_of_a_foreign_function_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign, empty = closure_over(None), closure_over(None)
    empty.__wrapped__ = len
    del empty.__closure__[0].cell_contents
    for name, function in (("clip_grad_norm_", foreign), ("clip_grad_value_", empty)):
        monkeypatch.setattr(clip_grad, name, function)
    monkeypatch.setattr(clip_grad, "_clip_grads_with_norm_", foreign)
    with pytest.warns(UserWarning, match="does nothing"):
        torch_clipping._install()
    assert foreign() is None


class Engine:
    """Stands for one."""


def test_the_functions_are_pytorchs_own_after_the_last_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_"]
    for name in names:
        own = clip_grad._no_grad(getattr(clip_grad, name).__wrapped__)
        monkeypatch.setattr(clip_grad, name, own)
    monkeypatch.setattr(torch_clipping, "_engines", WeakValueDictionary())
    monkeypatch.setattr(torch_clipping, "_swapped", [])

    def are_pytorchs() -> list[bool]:
        functions = [getattr(clip_grad, name) for name in names]
        return [function.__closure__[0].cell_contents is function.__wrapped__ for function in functions]

    first, second = (cast(Any, Engine()) for _ in range(2))
    found = [are_pytorchs()]
    for act, engine in ((serve, first), (serve, second), (leave, first), (leave, second), (serve, first)):
        act(engine)
        found.append(are_pytorchs())
    assert found == [[expected] * 3 for expected in (True, False, False, False, True, False)]
