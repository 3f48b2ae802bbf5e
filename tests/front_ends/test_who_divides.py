"""The documentation's table of who divides by what: every row is run, on two ranks with losses of different weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from support.accelerate_state import fresh
from support.documents import DOCS
from support.engines import build, masters
from support.models import OneWeight
from support.ranks import RankGroup
from support.setup import Setup

LOSS_SUMS = ((6.0, 2.0), (4.0, 20.0))
"""Sum of the losses' gradients, of both ranks of the window's two micro-batches (each a request)."""
TOKENS = ((2, 1), (1, 4))
MEANS = 3.5  # of the means 3, 2, 4 and 5 of the micro-batches
TOTAL = 4.0  # 32 by 8 tokens


def rows() -> list[str]:
    """First cells of the table."""
    page = (DOCS / "concepts/divisors.md").read_text(encoding="utf-8")
    _, *cells = re.findall(r"^\| (?!-)(.*?) \|", page, flags=re.MULTILINE)
    return cells


def mine(rank: int, means: bool) -> list[tuple[torch.Tensor, int]]:
    """The factors of the weight in the two micro-batches of a rank, and their tokens."""
    pairs = [(sums[rank], tokens[rank]) for sums, tokens in zip(LOSS_SUMS, TOKENS, strict=True)]
    return [(torch.tensor(total / tokens if means else total), tokens) for total, tokens in pairs]


def with_engine(means: bool, config: dict[str, Any], step: dict[str, Any]) -> float:
    engine = build(Setup(config=config), model=OneWeight(2), lr=1.0)
    for value, tokens in mine(engine.global_rank, means):
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(value.to(engine.device)), weight=tokens)
    engine.step(**step)
    update = -float(masters(engine)[0][0])
    engine.destroy()
    return update


def with_lightning(means: bool, options: dict[str, Any] | None) -> float:
    import lightning.pytorch as pl

    from requestzero import MicroBatch, RequestZeRO

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = OneWeight(2)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.model(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        strategy="ddp" if options is None else RequestZeRO(**options),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        accumulate_grad_batches=2,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        **quiet,
    )
    batches = mine(torch.distributed.get_rank(), means)
    items = [value if options is None else MicroBatch(value, weight=tokens) for value, tokens in batches]
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(items, batch_size=None))
    return -float(module.model.weight[0])


def with_fabric(means: bool, options: dict[str, Any]) -> float:
    from lightning.fabric import Fabric

    from requestzero import RequestZeROFabric

    fabric = Fabric(strategy=RequestZeROFabric(**options), accelerator="cpu", devices=2)
    fabric.launch()
    module: Any = OneWeight(2)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
    engine = RequestZeROFabric.engine_of(model)
    for value, tokens in mine(fabric.global_rank, means):
        if not means:
            engine.add_weight(tokens)
        fabric.backward(model(value))
    optimizer.step()
    return -float(module.weight[0])


def with_accelerate(means: bool, normalization: str, blocks: bool) -> float:
    from accelerate import Accelerator

    from requestzero import MicroBatch, RequestZeROPlugin

    with fresh():
        plugin = RequestZeROPlugin(normalization=normalization)
        accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
        model: Any = OneWeight(2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        batches = mine(accelerator.process_index, means)
        if blocks:
            for value, tokens in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(model(value.to(accelerator.device)), weight=tokens)
                    optimizer.step()
        else:
            loader = [MicroBatch(value, weight=tokens) for value, tokens in batches]
            for value in plugin.requests(accelerator).micro_batches(loader):
                accelerator.backward(model(value))
                optimizer.step()
        update = -float(accelerator.unwrap_model(model).weight[0])
        accelerator.free_memory()
        return update


def with_recipe(normalization: str) -> float:
    """The loss that the recipes call backward with."""
    from requestzero.recipes.model import micro_batch_loss

    engine = build(Setup(), model=OneWeight(2), lr=1.0)
    for value, tokens in mine(engine.global_rank, means=False):
        loss = micro_batch_loss(engine(value.to(engine.device)), torch.tensor(tokens), normalization)
        engine.backward(loss, weight=tokens)
    engine.step(normalization=normalization)
    update = -float(masters(engine)[0][0])
    engine.destroy()
    return update


# First cell -> the runs of the row, each a function, its arguments, and the update that it makes.
RUNS: dict[str, list[tuple[Any, tuple[Any, ...], float]]] = {
    "engine: `step()`, `step(divisor=d)`": [
        (with_engine, (True, {}, {}), 2 * MEANS),
        (with_engine, (True, {}, {"divisor": 2}), MEANS),
        (with_engine, (True, {"gradient_accumulation_steps": 2}, {}), MEANS),
    ],
    'engine: `step(normalization="mean")`': [(with_engine, (True, {}, {"normalization": "mean"}), MEANS)],
    'engine: `step(normalization="sum")`': [(with_engine, (True, {}, {"normalization": "sum"}), 2 * MEANS)],
    'engine: `step(normalization="token")`': [(with_engine, (False, {}, {"normalization": "token"}), TOTAL)],
    'Lightning: `"mean"`': [(with_lightning, (True, {"normalization": "mean"}), MEANS)],
    'Lightning: `"sum"`': [(with_lightning, (True, {"normalization": "sum"}), 2 * MEANS)],
    'Lightning: `"token"`': [(with_lightning, (False, {"normalization": "token"}), TOTAL)],
    'Fabric: `"sum"` (its default)': [(with_fabric, (True, {}), 2 * MEANS)],
    'Fabric: `"mean"`': [(with_fabric, (True, {"normalization": "mean"}), MEANS)],
    'Fabric: `"token"`': [(with_fabric, (False, {"normalization": "token"}), TOTAL)],
    'Accelerate: `"mean"`': [(with_accelerate, (True, "mean", blocks), MEANS) for blocks in (True, False)],
    'Accelerate: `"sum"`': [(with_accelerate, (True, "sum", True), 2 * MEANS)],
    'Accelerate: `"token"`': [(with_accelerate, (False, "token", blocks), TOTAL) for blocks in (True, False)],
    'recipes: `"token"` (their default), `"sum"`': [
        (with_recipe, ("token",), TOTAL),
        (with_recipe, ("sum",), 16.0),  # 32 over two ranks
    ],
    'recipes: `"mean"`': [(with_recipe, ("mean",), MEANS)],
    "for comparison: Lightning with DDP": [(with_lightning, (True, None), MEANS)],
}

# Compared with DDP, whatever the split into micro-batches, by these tests.
TRAINER = {
    "Trainer, model with `num_items_in_batch`": "test_the_gradient_does_not_depend_on_the_split",
    "Trainer, other models": "test_other_models_are_trained_as_under_ddp",
}


def test_every_row_is_run() -> None:
    assert sorted(rows()) == sorted([*RUNS, *TRAINER])
    tests = (Path(__file__).parents[1] / "accelerate/test_trainer.py").read_text(encoding="utf-8")
    assert all(f"def {name}(" in tests for name in TRAINER.values())


@pytest.mark.parametrize("row", RUNS)
def test_a_row(two_ranks: RankGroup, row: str) -> None:
    for function, arguments, update in RUNS[row]:
        assert two_ranks.run(function, *arguments) == [update] * 2
