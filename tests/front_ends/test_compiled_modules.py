"""``torch.compile`` of the module, in every front end: the weights of the module that is not compiled, under DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from lightning.fabric import Fabric
from torch._dynamo.utils import counters

from requestzero import RequestZeRO, RequestZeROFabric, RequestZeROPlugin
from support.accelerate_state import fresh
from support.lightning_parity import Net, data, trainer_of
from support.ranks import RankGroup
from support.whole_weights import copies

BACKEND = "eager"
"""Nothing is generated, which would take long; what dynamo traces is the same."""
ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def lightning(stage: int | None) -> torch.nn.Module:
    """Fit with a compiled module, and evaluate it."""
    module = Net()
    strategy: Any = "ddp" if stage is None else RequestZeRO(stage=stage)
    trainer = trainer_of("ddp", strategy=strategy, max_epochs=1, accumulate_grad_batches=2)
    given: Any = module if stage is None else torch.compile(module, backend=BACKEND)
    trainer.fit(given, data(4))
    trainer.test(given, data(2), verbose=False)
    return module


def fabric(stage: int | None) -> torch.nn.Module:
    strategy: Any = "ddp" if stage is None else RequestZeROFabric(stage=stage)
    launched = Fabric(accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=strategy)
    launched.launch()
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = launched.setup(plain if stage is None else torch.compile(plain, backend=BACKEND), optimizer)
    for number, batch in enumerate(ROWS.view(4, 2, 4)):
        with launched.no_backward_sync(model, enabled=number % 2 == 0):
            launched.backward(model(batch).square().mean())
        if number % 2:
            launched.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return plain


def accelerate(stage: int | None) -> torch.nn.Module:
    """By Accelerate's own plugin."""
    return _accelerate(stage, net(), dynamo_plugin=TorchDynamoPlugin(backend=BACKEND))


def compiled_before(stage: int | None) -> torch.nn.Module:
    """The module that ``prepare`` gets."""
    model = net()
    _accelerate(stage, model if stage is None else torch.compile(model, backend=BACKEND))
    return model


def _accelerate(stage: int | None, model: Any, **options: Any) -> torch.nn.Module:
    from accelerate import Accelerator

    if stage is None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    else:
        plugin = RequestZeROPlugin(zero_stage=stage)
        accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2, **options)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = torch.utils.data.DataLoader(ROWS, batch_size=2)  # type: ignore[arg-type]
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(wrapped, keep_torch_compile=False)


def train(program: Callable[[int | None], torch.nn.Module], stage: int | None) -> tuple[list[torch.Tensor], int]:
    """The weights, and how many functions were compiled."""
    with torch._dynamo.config.patch(disable=False), fresh():
        torch._dynamo.reset()
        counters.clear()
        try:
            return copies(program(stage)), counters["frames"]["ok"]
        finally:
            torch._dynamo.reset()


@pytest.mark.parametrize(
    ("program", "stage"),
    [(lightning, 1), (fabric, 2), (fabric, 3), (accelerate, 1), (accelerate, 2), (compiled_before, 2)],
)
def test_weights_are_those_without_compiling(two_ranks: RankGroup, program: Any, stage: int) -> None:
    expected = two_ranks.run(train, program, None)
    for (found, compiled), (weights, nothing) in zip(two_ranks.run(train, program, stage), expected, strict=True):
        torch.testing.assert_close(found, weights)
        assert (nothing, compiled > 0) == (0, True)


def fits_of_other_strategies() -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
    """A compiled and a plain module under DDP after a fit of ours; the error for a stock ``DeepSpeedStrategy``."""
    from lightning.pytorch.strategies import DeepSpeedStrategy
    from lightning.pytorch.trainer import trainer as trainers

    lightning(1)
    found = []
    for compiles in (True, False):
        module = Net()
        given: Any = torch.compile(module, backend=BACKEND) if compiles else module
        trainer_of("ddp", max_epochs=1).fit(given, data(4))
        found.append(copies(module))
    stock: Any = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    with pytest.raises(RuntimeError) as refused:
        trainers._verify_strategy_supports_compile(trainers._maybe_unwrap_optimized(torch.compile(Net())), stock)
    return found[0], found[1], str(refused.value)


def test_trainers_of_other_strategies_are_as_before(one_rank: RankGroup) -> None:
    ((compiled, plain, refused),) = one_rank.run(fits_of_other_strategies)
    torch.testing.assert_close(compiled, plain)
    assert "incompatible with the current strategy: `DeepSpeedStrategy`" in refused
