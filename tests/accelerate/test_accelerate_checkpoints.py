"""``save_state`` and ``load_state``: a resumed run ends as the uninterrupted one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from requestzero import RequestLoader
from support.accelerate_loops import Loop, make_accelerator
from support.accelerate_state import fresh
from support.failures import assert_fails
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER

BF16 = {**KEEP_OPTIMIZER, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
PLUGINS: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_stage": 1},
    "stage 2 offload bf16": {"offload_optimizer_device": "cpu", "hf_ds_config": BF16},
}


class Counter:
    """Something of the user's own."""

    def __init__(self) -> None:
        self.updates = 0

    def state_dict(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.updates = state["updates"]


def run(plugin: dict[str, Any], updates: int, save: str | None = None, load: str | None = None) -> dict[str, Any]:
    """Train for ``updates`` windows in all with dropout, a scheduler, AdamW and a ``RequestLoader``."""
    with fresh():
        accelerator = make_accelerator(Loop(plugin=plugin, n=2))
        torch.manual_seed(1)
        model: Any = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        requests = [[torch.full((8,), 10.0 * i + j) for j in range(1 + 3 * i % 5)] for i in range(7)]
        loader: Any = RequestLoader(requests, torch.stack, filler=torch.zeros_like)
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
        counter = Counter()
        accelerator.register_for_checkpointing(loader, counter)
        if load is not None:
            accelerator.backward(model(torch.ones(1, 8, dtype=model.module[0].weight.dtype)).sum())  # to be discarded
            accelerator.load_state(load)
        seen = []
        while counter.updates < updates:
            for inputs in loader:
                inputs = inputs.to(model.module[0].weight.dtype)
                seen.append(float(inputs[0, 0]))
                accelerator.backward(model(inputs).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    counter.updates += 1
                    if save is not None and counter.updates == updates:
                        accelerator.save_state(save)
                    if counter.updates == updates:
                        break
        engine = accelerator.deepspeed_engine_wrapped.engine
        state = [
            value.clone() if isinstance(value, torch.Tensor) else value
            for states in engine.optimizer.optimizer.state.values()
            for _, value in sorted(states.items())
        ]
        return {
            "weights": [p.detach().clone() for p in model.parameters()],
            "masters": [p.detach().clone() for p in engine.optimizer.single_partition_of_fp32_groups],
            "state": state,
            "counts": (engine.global_steps, engine.applied_updates, counter.updates),
            "rates": (optimizer.param_groups[0]["lr"], scheduler.get_last_lr()),
            "seen": seen,
            "random": torch.get_rng_state(),
        }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.parametrize("saved_after", [2, 4])  # within the first epoch, and after its shorter last window
def test_resumed_equals_uninterrupted(two_ranks: RankGroup, tmp_path: Path, name: str, saved_after: int) -> None:
    whole = two_ranks.run(run, PLUGINS[name], 7)
    first = two_ranks.run(run, PLUGINS[name], saved_after, save=str(tmp_path / "state"))
    resumed = two_ranks.run(run, PLUGINS[name], 7, load=str(tmp_path / "state"))
    for expected, before, got in zip(whole, first, resumed, strict=True):
        assert before["seen"] + got["seen"][:] == expected["seen"]
        for key in expected.keys() - {"seen"}:
            assert same(expected[key], got[key]), key
        assert expected["counts"] == (7, 7, 7)


def save_inside_a_window(path: str) -> None:
    with fresh():
        accelerator = make_accelerator(Loop())
        model: Any = torch.nn.Linear(8, 1)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        accelerator.backward(model(torch.ones(1, 8)).sum())
        accelerator.save_state(path)


def test_a_state_inside_a_window_is_refused(two_ranks: RankGroup, tmp_path: Path) -> None:
    message = r"^RuntimeError: save_checkpoint\(\) with an open update window \(1 micro-batches since the last step\)"
    assert_fails(two_ranks, message, save_inside_a_window, str(tmp_path))
