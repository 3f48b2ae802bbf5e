"""``requestzero.accelerate.Accelerator``: the same as the patched ``accelerate.Accelerator``, with nothing patched."""

from __future__ import annotations

import inspect
import json
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DeepSpeedPlugin

import requestzero.accelerate
from requestzero import RequestZeROPlugin
from support.accelerate_loops import Loop, data, train
from support.accelerate_state import fresh, is_patched, unpatched
from support.failures import assert_fails
from support.models import RowWeight
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER

STOCK = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}


def train_with_our_class(loop: Loop) -> tuple[dict[str, Any], bool]:
    """Train with our class; the record, and True if anything was patched."""
    with unpatched():
        loop.own_class = True
        return train(loop), is_patched()


@pytest.mark.parametrize(
    "loop",
    [
        Loop(n=3, clip=0.5),
        Loop(plugin={"zero_stage": 1, "gradient_accumulation_steps": 2}, epochs=2),
        Loop(plugin={"hf_ds_config": KEEP_OPTIMIZER, "offload_optimizer_device": "cpu", "normalization": "sum"}, n=2),
        Loop(plugin=None, n=2),
    ],
    ids=["clipping", "stage 1, steps of the plugin", "offload, sum", "without a plugin"],
)
def test_the_same_updates_without_a_patch(two_ranks: RankGroup, loop: Loop) -> None:
    want = two_ranks.run(train, loop)
    for (found, patched), record in zip(two_ranks.run(train_with_our_class, loop), want, strict=True):
        assert record["updates"]
        assert json.dumps(found, default=str) == json.dumps(record, default=str)
        assert not patched


def train_under_a_stock_plugin(own: bool) -> dict[str, Any]:
    """A stock plugin, of which both classes make a stock engine."""
    with fresh(accelerate_use_deepspeed="true"), unpatched():
        cls = requestzero.accelerate.Accelerator if own else accelerate.Accelerator
        accelerator = cls(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=STOCK))
        model = RowWeight()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        for row in data(2, 2).view(2, 2, 1, 8):
            with accelerator.accumulate(model):
                accelerator.backward(model(row[accelerator.process_index]))
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        engine = accelerator.deepspeed_engine_wrapped
        kinds = [type(item).__name__ for item in (model, model.optimizer, optimizer, engine)]
        return {"weights": model.module.weight.tolist(), "norm": float(norm), "kinds": kinds}


def test_a_stock_plugin_is_stock(two_ranks: RankGroup) -> None:
    want = two_ranks.run(train_under_a_stock_plugin, False)
    assert want[0]["kinds"] == [
        "DeepSpeedEngine", "DeepSpeedZeroOptimizer", "DeepSpeedOptimizerWrapper", "DeepSpeedEngineWrapper"
    ]  # fmt: skip
    assert any(want[0]["weights"])
    assert two_ranks.run(train_under_a_stock_plugin, True) == want


def misuse(how: str) -> None:
    with fresh(), unpatched():
        ours = requestzero.accelerate.Accelerator
        if how == "stock class":
            accelerator = accelerate.Accelerator(deepspeed_plugin=RequestZeROPlugin())
            model = RowWeight()
            accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        if how == "cpu":
            ours(deepspeed_plugin=RequestZeROPlugin(), cpu=True)
        if how == "steps":
            ours(deepspeed_plugin=RequestZeROPlugin(gradient_accumulation_steps=2), gradient_accumulation_steps=3)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "stock class",
            r"RuntimeError: accelerate\.Accelerator would build a stock DeepSpeed engine .* has nothing patched: use",
        ),
        ("cpu", r"ValueError: Accelerator\(cpu=True\) makes Accelerate leave DeepSpeed out"),
        ("steps", r"ValueError: gradient_accumulation_steps is 2 in the arguments .* and 3 in the Accelerator"),
    ],
)
def test_misuse_is_told(two_ranks: RankGroup, how: str, message: str) -> None:
    assert_fails(two_ranks, f"^{message}", misuse, how)


def test_parameters_are_those_of_accelerate() -> None:
    with unpatched():
        assert inspect.signature(requestzero.accelerate.Accelerator) == inspect.signature(accelerate.Accelerator)
