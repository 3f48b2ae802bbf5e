"""``normalization="token"`` with Accelerate: weights from the loader or from ``accelerator.backward(weight=...)``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from requestzero import MicroBatch
from support.accelerate_loops import Loop, data, prepare, weights
from support.accelerate_state import fresh
from support.failures import assert_fails
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER

TOKEN = {"normalization": "token"}
TOKENS = [[3, 1], [0, 2], [4, 0], [1, 5], [0, 0], [0, 0], [2, 2], [7, 1]]
"""Of each rank's micro-batches; two make a window, and the third window has none."""


def loop_with_weights(how: str, plugin: dict[str, Any]) -> list[dict[str, Any]]:
    """Four windows of two micro-batches; the losses are sums. What happened in each."""
    with fresh():
        accelerator, model, optimizer, _, scheduler = prepare(Loop(plugin={**TOKEN, **plugin}, n=2))
        rank, engine = accelerator.process_index, accelerator.deepspeed_engine_wrapped.engine
        requests = accelerator.deepspeed_plugin.requests(accelerator)
        rows = data(8, 2)[rank::2][:, None]
        mine = [tokens[rank] for tokens in TOKENS]
        found = []

        def end_of_step() -> None:
            norm = None
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), float("inf")))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped, applied = optimizer.step_was_skipped, float(engine.get_global_grad_norm())
                rate = optimizer.param_groups[0]["lr"]
                found.append({"weights": weights(accelerator, model), "norms": [norm, applied], "lr": rate})
                assert skipped is (len(found) == 3)

        if how == "accumulate":
            for row, count in zip(rows, mine, strict=True):
                with accelerator.accumulate(model):
                    accelerator.backward(model(row.to(accelerator.device)), weight=count)
                    end_of_step()
        elif how == "blocks":
            for start in range(0, 8, 2):
                with requests.request():
                    for index in (start, start + 1):
                        weight = torch.tensor(mine[index], device=accelerator.device)
                        accelerator.backward(model(rows[index].to(accelerator.device)), weight=weight)
                end_of_step()
        else:
            loader = [MicroBatch(row, weight=count) for row, count in zip(rows, mine, strict=True)]
            for inputs in requests.micro_batches(loader):
                accelerator.backward(model(inputs))
                end_of_step()
        assert (engine.empty_updates, engine.applied_updates) == (1, 3)
        accelerator.free_memory()
        return found


@pytest.mark.parametrize("how", ["accumulate", "blocks", "loader"])
def test_windows_are_divided_by_their_weight(two_ranks: RankGroup, how: str) -> None:
    offload = {"hf_ds_config": KEEP_OPTIMIZER, "offload_optimizer_device": "cpu"}
    plugin = offload if how == "loader" else {"zero_stage": 1}
    for found in two_ranks.run(loop_with_weights, how, plugin):
        position, rates = torch.zeros(8, dtype=torch.float64), []
        for index, window in enumerate(found):
            rows = data(8, 2)[4 * index : 4 * index + 4].double()
            total = sum(map(sum, TOKENS[2 * index : 2 * index + 2]))
            rates.append(window["lr"])
            gradient = rows.sum(0) / max(total, 1) if total else torch.zeros(8, dtype=torch.float64)
            # The rate that the schedule had left before this window's update.
            position -= (rates[-2] if index else 0.5) * gradient
            assert window["weights"] == pytest.approx(position.tolist(), rel=1e-6, abs=1e-6)
            assert window["norms"] == pytest.approx([float(gradient.norm())] * 2, rel=1e-6)
        assert rates == [0.25, 0.125, 0.125, 0.0625]


def wrong(how: str) -> None:
    with fresh():
        accelerator, model, *_ = prepare(Loop(plugin=TOKEN))
        row = data(1, 2)[:1].to(accelerator.device)
        if how == "missing":
            accelerator.backward(model(row))
        elif how == "divided":
            accelerator.backward(model(row), weight=2, scale_wrt_gas=False)
        else:
            for inputs in accelerator.deepspeed_plugin.requests(accelerator).micro_batches([MicroBatch(row, weight=2)]):
                accelerator.backward(model(inputs), **({"weight": 3} if how == "both" else {}))
                accelerator.backward(model(inputs))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"^ValueError: accelerator.backward\(loss\) has no weight, by which normalization='token' divides"),
        ("both", r"^ValueError: accelerator.backward\(weight=3\) for a MicroBatch whose loader gives the weight 2"),
        ("two backwards", r"^ValueError: accelerator.backward\(loss\) has no weight"),
        ("divided", r"^ValueError: accelerator.backward\(scale_wrt_gas=False\) says .* would divide once more"),
    ],
)
def test_weights_that_cannot_be_right(two_ranks: RankGroup, how: str, message: str) -> None:
    assert_fails(two_ranks, message, wrong, how)


def other_normalizations(normalization: str) -> list[float]:
    with fresh():
        accelerator, model, optimizer, *_ = prepare(Loop(plugin={"normalization": normalization}, n=2))
        for row in data(2, 2)[accelerator.process_index :: 2]:
            with accelerator.accumulate(model):
                accelerator.backward(model(row[None].to(accelerator.device)), weight=5)
                optimizer.step()
        return weights(accelerator, model)


@pytest.mark.parametrize(("normalization", "divisor"), [("mean", 4), ("sum", 2)])
def test_other_normalizations_do_not_use_the_weights(two_ranks: RankGroup, normalization: str, divisor: int) -> None:
    for found in two_ranks.run(other_normalizations, normalization):
        assert found == (-0.5 * data(2, 2).sum(0) / divisor).tolist()
