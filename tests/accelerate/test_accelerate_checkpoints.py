"""``save_state`` and ``load_state``: a resumed run ends as the uninterrupted one, bit for bit."""

from __future__ import annotations

import os
import signal
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
from support.whole_weights import copies

BF16 = {**KEEP_OPTIMIZER, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
PLUGINS: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_stage": 1},
    "stage 2 offload bf16": {"offload_optimizer_device": "cpu", "hf_ds_config": BF16},
    "stage 3": {"zero_stage": 3, "offload_param_device": "cpu"},
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
        masters, state = masters_and_state(engine)
        return {
            "weights": copies(model),
            "masters": masters,
            "state": state,
            "counts": (engine.global_steps, engine.applied_updates, counter.updates),
            "rates": (optimizer.param_groups[0]["lr"], scheduler.get_last_lr()),
            "seen": seen,
            "random": torch.get_rng_state(),
        }


def masters_and_state(engine: Any) -> tuple[list[Any], list[Any]]:
    """Of this rank's partition; at stage 3 of all ranks, without the padding of parameters that they do not divide."""
    if engine.zero_optimization_partition_weights():
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        params = list(engine.module.parameters())
        states = [safe_get_full_optimizer_state(p, key) for p in params for key in ("exp_avg", "exp_avg_sq")]
        return [safe_get_full_fp32_param(p) for p in params], states
    masters = [p.detach().clone() for p in engine.optimizer.single_partition_of_fp32_groups]
    return masters, [
        value.clone() if isinstance(value, torch.Tensor) else value
        for states in engine.optimizer.optimizer.state.values()
        for _, value in sorted(states.items())
    ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.mark.slow
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


def save_inside_a_request(path: str) -> None:
    with fresh():
        accelerator = make_accelerator(Loop())
        model: Any = torch.nn.Linear(8, 1)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        with accelerator.deepspeed_plugin.requests(accelerator).request():
            accelerator.backward(model(torch.ones(1, 8)).sum())
            accelerator.save_state(path)


def test_a_state_inside_a_request_is_refused(two_ranks: RankGroup, tmp_path: Path) -> None:
    message = r"^RuntimeError: save_checkpoint\(\) inside a request \(1 micro-batches since the last step\)"
    assert_fails(two_ranks, message, save_inside_a_request, str(tmp_path))


def accumulate(accelerator: Any, model: Any, optimizer: Any, begin: int, end: int) -> None:
    for number in range(begin, end):
        with accelerator.accumulate(model):
            x = torch.full((1, 8), number + accelerator.process_index / 4, dtype=model.module.weight.dtype)
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()


def inside_a_window(plugin: dict[str, Any], folder: str) -> dict[str, Any]:
    """Save after 6 of windows of 4, of which it names the folders; resume in another Accelerator; both go on to 12."""
    from accelerate.utils import ProjectConfiguration

    weights, names = [], []
    for number in range(2):
        with fresh():
            project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
            accelerator = make_accelerator(Loop(plugin=plugin, n=4, accelerator={"project_config": project}))
            torch.manual_seed(1)
            model: Any = torch.nn.Linear(8, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
            if number == 0:
                accumulate(accelerator, model, optimizer, 0, 4)
                accelerator.save_state()
                accumulate(accelerator, model, optimizer, 4, 5)
                accelerator.save_state()
                accumulate(accelerator, model, optimizer, 5, 6)
                accelerator.save_state()
                names = sorted(path.name for path in Path(folder, "checkpoints").iterdir())
            else:
                accelerator.load_state()
                assert accelerator.deepspeed_engine_wrapped.engine.update_window.requests == 2
            accumulate(accelerator, model, optimizer, 6, 12)
            assert accelerator.deepspeed_engine_wrapped.engine.applied_updates == 3
            weights.append([p.detach().float().clone() for p in model.parameters()])
    return {"same": all(map(torch.equal, *weights)), "names": names}


@pytest.mark.parametrize("name", PLUGINS)
def test_resumed_inside_a_window(two_ranks: RankGroup, tmp_path: Path, name: str) -> None:
    for found in two_ranks.run(inside_a_window, PLUGINS[name], str(tmp_path)):
        assert found == {"same": True, "names": ["checkpoint_1", "checkpoint_2"]}


def preempted(plugin: dict[str, Any], folder: str, begin: int, signalled: bool) -> tuple[int, list[torch.Tensor]]:
    """Micro-batches of a run in windows of 4, where rank 1 may get SIGTERM after the sixth; its weights."""
    with fresh():
        accelerator = make_accelerator(Loop(plugin=plugin, n=4))
        torch.manual_seed(1)
        model: Any = torch.nn.Linear(8, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        if begin:
            accelerator.load_state(folder)
        previous = signal.signal(signal.SIGTERM, lambda *_: accelerator.set_trigger())
        for number in range(begin, 12):
            accumulate(accelerator, model, optimizer, number, number + 1)
            if signalled and number == 5 and accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if accelerator.check_trigger():
                accelerator.save_state(folder)
                break
        signal.signal(signal.SIGTERM, previous)
        return number + 1, copies(model)


@pytest.mark.parametrize("name", PLUGINS)
def test_a_program_that_saves_on_sigterm(two_ranks: RankGroup, tmp_path: Path, name: str) -> None:
    """Inside a window, with the trigger by which Accelerate's ranks tell each other."""
    folder = str(tmp_path / "state")
    assert [count for count, _ in two_ranks.run(preempted, PLUGINS[name], folder, 0, True)] == [6, 6]
    expected = two_ranks.run(preempted, PLUGINS[name], folder, 0, False)
    for (_, want), (_, got) in zip(expected, two_ranks.run(preempted, PLUGINS[name], folder, 6, False), strict=True):
        assert all(map(torch.equal, got, want))


def marked(folder: str, save: bool) -> list[Any]:
    """A pass over a loader whose state is saved after the fourth of eight requests, three to a window."""
    with fresh():
        accelerator = make_accelerator(Loop())
        model: Any = torch.nn.Linear(8, 1)
        torch.nn.init.zeros_(model.weight)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        requests = [[torch.full((8,), float(i))] * (1 + i % 3) for i in range(8)]
        loader = RequestLoader(requests, torch.stack, filler=torch.zeros_like, shuffle=False)
        passes = accelerator.deepspeed_plugin.requests(accelerator).micro_batches(loader, requests_per_update=3)
        accelerator.register_for_checkpointing(passes)
        if not save:
            accelerator.load_state(folder)
        engine, applied, saved = accelerator.deepspeed_engine_wrapped.engine, [], False
        for inputs in passes:
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            optimizer.zero_grad()
            if save and not saved and engine.update_window.requests == 1 and engine.applied_updates == 1:
                accelerator.save_state(folder)
                saved = True
            applied.append((engine.applied_updates, engine.update_window.requests))
        return [applied, *model.weight.detach().flatten().tolist()]


def test_a_pass_resumes_inside_its_window(two_ranks: RankGroup, tmp_path: Path) -> None:
    whole = two_ranks.run(marked, str(tmp_path / "state"), True)
    for want, got in zip(whole, two_ranks.run(marked, str(tmp_path / "state"), False), strict=True):
        assert got[1:] == want[1:]
        assert got[0] == want[0][len(want[0]) - len(got[0]) :]
        assert 0 < len(got[0]) < len(want[0])
