"""Stock and request-safe engines in one program."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

from requestzero import RequestZeROPlugin
from support.accelerate_loops import Loop, data, train
from support.accelerate_state import fresh
from support.class_names import optimizer_name
from support.models import RowWeight
from support.ranks import RankGroup

STOCK = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}


def train_both() -> dict[str, Any]:
    """Two models of one program, each under its own plugin: micro-batch by micro-batch, one update each."""
    with fresh():
        plugins = {
            "ours": RequestZeROPlugin(gradient_clipping=0.0),
            "stock": DeepSpeedPlugin(hf_ds_config=STOCK),
        }
        ours = Accelerator(deepspeed_plugins=plugins)
        stock = Accelerator()
        model, optimizer = _prepare(ours)
        ours.state.select_deepspeed_plugin("stock")
        stock_model, stock_optimizer = _prepare(stock)
        rows = data(2, 2).view(2, 2, 1, 8)
        for row in rows:
            batch = row[ours.process_index]
            with ours.accumulate(model), stock.accumulate(stock_model):
                ours.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()
                stock.backward(stock_model(batch))
                stock_optimizer.step()
                with ours.no_sync(model), stock.no_sync(stock_model):
                    pass
        ours.clip_grad_norm_(model.parameters(), float("inf"))
        stock_norm = stock.clip_grad_norm_(stock_model.parameters(), float("inf"))
        return {
            "engines": [type(item).__name__ for item in (model, stock_model)],
            "optimizers": [type(item.optimizer).__name__ for item in (model, stock_model)],
            "wrappers": [type(item).__name__ for item in (optimizer, stock_optimizer)],
            "weights": [item.module.weight.tolist() for item in (model, stock_model)],
            "stock norm": stock_norm,
            "mixed": [type(item).__name__ for item in (ours, stock)],
        }


def _prepare(accelerator: Accelerator) -> Any:
    model = RowWeight()
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))


def test_the_others_stay_stock(two_ranks: RankGroup) -> None:
    for found in two_ranks.run(train_both):
        assert found["engines"] == ["RequestZeROEngine", "DeepSpeedEngine"]
        assert found["optimizers"] == [optimizer_name(), "DeepSpeedZeroOptimizer"]
        assert found["wrappers"] == ["RequestZeROOptimizerWrapper", "DeepSpeedOptimizerWrapper"]
        expected = (-data(2, 2).sum(0) / 2 * 0.5).tolist()
        assert found["weights"] == [expected, expected]
        assert found["stock norm"] > 0


def stock_alone() -> tuple[str, str]:
    """A stock plugin in a process that has built one of ours."""
    with fresh(accelerate_use_deepspeed="true"):
        RequestZeROPlugin()
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=STOCK))
        model, _ = _prepare(accelerator)
        return str(type(accelerator)), type(model.optimizer).__name__


def test_without_our_plugin_nothing_changes(two_ranks: RankGroup) -> None:
    two_ranks.run(train, Loop())
    assert two_ranks.run(stock_alone) == [(str(Accelerator), "DeepSpeedZeroOptimizer")] * 2
    for record in two_ranks.run(train, Loop(plugin=None)):
        assert "counts" not in record
