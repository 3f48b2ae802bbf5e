"""Models that return objects into which DeepSpeed does not look, so that it does not notice their backwards."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from requestzero.zero.engine.outputs import are_searched
from support.engines import build
from support.models import OneWeight, full_grad
from support.ranks import RankGroup
from support.setup import Setup


@dataclass
class Outputs:
    """Outputs of a model."""

    loss: torch.Tensor


class InDataclass(OneWeight):
    """A weight whose loss comes in a dataclass."""

    def forward(self, x: torch.Tensor) -> Outputs:  # type: ignore[override]
        return Outputs(super().forward(x))


class InTuple(OneWeight):
    """A weight whose loss comes in an object in a tuple, beside a tensor that the loss does not need."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, SimpleNamespace]:  # type: ignore[override]
        return self.weight * 2, SimpleNamespace(loss=super().forward(x))


class Plain(OneWeight):
    """A weight whose loss comes in a dict."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x)}


def feed(engine: Any, value: float, request_end: bool = True) -> None:
    engine.set_gradient_accumulation_boundary(request_end)
    outputs = engine(torch.full_like(engine.module.weight, value))
    outputs = outputs[1] if isinstance(outputs, tuple) else outputs
    engine.backward(outputs["loss"] if isinstance(outputs, dict) else outputs.loss)


def comparisons(setup: Setup, model: type[OneWeight]) -> int:
    """Return how often the ranks compare what they do in a window of two requests that nobody announces."""
    engine = build(setup, model=model())
    for _ in range(2):
        before = engine.agreement._channel.rounds
        for value in (1.0, 2.0):
            feed(engine, value)
        engine.step()
    found = engine.agreement._channel.rounds - before
    engine.destroy()
    return int(found)


SETUPS = [Setup(stage=1), Setup(stage=2), Setup(stage=2, offload=True, model="bf16")]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_requests_are_agreed_on(two_ranks: RankGroup, setup: Setup) -> None:
    expected = two_ranks.run(comparisons, setup, Plain)
    assert expected[0] > 2
    for model in (InDataclass, InTuple):
        assert two_ranks.run(comparisons, setup, model) == expected


def aborted(setup: Setup, model: type[OneWeight]) -> list[float]:
    """Return the sum of a window of which the second request is aborted after its first micro-batch."""
    engine = build(setup, model=model())
    feed(engine, 1.0)
    feed(engine, 2.0, request_end=False)
    engine.abort_request("no longer wanted")
    feed(engine, 4.0)
    total: list[float] = full_grad(engine).tolist()
    engine.step()
    engine.destroy()
    return total


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_request_is_aborted(two_ranks: RankGroup, setup: Setup) -> None:
    setup = Setup(stage=setup.stage, offload=setup.offload, model=setup.model, config={"requestzero": {"abort": True}})
    for model in (Plain, InDataclass, InTuple):
        assert two_ranks.run(aborted, setup, model) == [[5.0] * 8] * 2, model


def factor(gradient_accumulation_steps: int) -> tuple[float, str]:
    """Return what ``loss.backward()`` of a loss in a dataclass applies, or the error."""
    setup = Setup(config={"gradient_accumulation_steps": gradient_accumulation_steps})
    engine = build(setup, model=InDataclass())
    try:
        for _ in range(gradient_accumulation_steps):
            engine(torch.full_like(engine.module.weight, 2.0)).loss.backward()
        return float(full_grad(engine)[0]), ""
    except RuntimeError as error:
        return 0.0, str(error)
    finally:
        engine.destroy()


def test_a_loss_that_nothing_would_divide_is_refused(two_ranks: RankGroup) -> None:
    assert two_ranks.run(factor, 1) == [(2.0, "")] * 2
    for _, error in two_ranks.run(factor, 2):
        assert "gradient_accumulation_steps (2) in engine.backward(loss) only" in error


def test_what_deepspeed_looks_into() -> None:
    tensor = torch.ones(1)
    assert are_searched({"loss": tensor, "hidden": [(tensor, None)], "count": 3})
    assert not are_searched((tensor, SimpleNamespace(loss=tensor)))
    assert not are_searched({"outputs": Outputs(tensor)})
