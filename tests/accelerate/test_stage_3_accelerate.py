"""ZeRO 3 under Accelerate: models sharded as they are built, whole weights on save, forwards on which ranks agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from requestzero import RequestZeROPlugin
from support.accelerate_loops import Loop, data, prepare, weights
from support.accelerate_state import fresh
from support.failures import assert_fails
from support.ranks import RankGroup
from support.tiny_llama import tiny_llama
from support.whole_weights import copies

TOKENS = torch.arange(8)[None]


def is_sharded(model: torch.nn.Module) -> bool:
    return all(hasattr(param, "ds_id") for param in model.parameters())


def pretrained(folder: str, flag: bool | None, dtype: str) -> dict[str, Any]:
    """Load a model, train it for one window and save it."""
    from transformers import AutoModelForCausalLM

    with fresh():
        plugin = RequestZeROPlugin(zero_stage=3, zero3_init_flag=flag, zero3_save_16bit_model=True)
        accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision=dtype, gradient_accumulation_steps=2)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found: dict[str, Any] = {"sharded": is_sharded(model), "loaded": copies(model)}
        with plugin.zero3_init_context_manager(enable=False):
            found["within"] = is_sharded(tiny_llama())
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.125)
        model, optimizer = accelerator.prepare(model, optimizer)
        for shift in range(2):
            tokens = (TOKENS + shift + accelerator.process_index) % 32
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                optimizer.step()
                optimizer.zero_grad()
        found["trained"] = copies(model)
        state = accelerator.get_state_dict(model)
        found["dtypes"] = state and {value.dtype for value in state.values()}
        accelerator.save_model(model, f"{folder}/saved")
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        return found


@pytest.mark.parametrize(("flag", "dtype"), [(None, "no"), (False, "bf16")])
def test_a_pretrained_model(two_ranks: RankGroup, tmp_path: Path, flag: bool | None, dtype: str) -> None:
    """Built sharded or whole, its weights are those of the file, and gathered when they are saved."""
    from safetensors.torch import load_file

    torch.manual_seed(3)
    saved = tiny_llama()
    saved.save_pretrained(tmp_path)
    first, second = two_ranks.run(pretrained, str(tmp_path), flag, dtype)
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    for found in (first, second):
        assert found["sharded"] is (flag is None)
        assert found["within"] is False
        assert all(map(torch.equal, found["loaded"], saved.parameters()))
        assert not all(map(torch.equal, found["loaded"], found["trained"]))
    assert (first["dtypes"], second["dtypes"]) == ({wanted}, None)
    state = load_file(tmp_path / "saved/model.safetensors")
    names = [name for name, _ in saved.named_parameters()]
    for name, weight in zip(names, first["trained"], strict=True):
        assert torch.equal(state[name], weight)


def gathered(how: str) -> None:
    with fresh():
        accelerator, model, *_ = prepare(Loop(plugin={"zero_stage": 3, "zero3_save_16bit_model": how == "alone"}))
        if how == "alone" and accelerator.process_index == 0:
            model(data(1, 1).to(accelerator.device))
        accelerator.get_state_dict(model)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("not asked", "^ValueError: Cannot get 16bit model weights .*zero3_save_16bit_model"),
        ("alone", "^RankDisagreementError: .*\\n  rank 0: begins .*\\n  rank 1: waits in accelerator\\.get_state_dict"),
    ],
)
def test_weights_that_are_not_gathered(two_ranks: RankGroup, how: str, message: str) -> None:
    assert_fails(two_ranks, message, gathered, how)


def evaluated(at: str) -> list[float]:
    """Evaluate after every block, also within windows, on all ranks; or on one rank, after the first window."""
    with fresh():
        accelerator, model, optimizer, loader, scheduler = prepare(Loop(plugin={"zero_stage": 3}, n=2, batches=4))
        engine = accelerator.deepspeed_engine_wrapped.engine
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(batch)
                if index == 2 and at == "a forward without a backward":
                    continue
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if at == "all ranks" or (at == "one rank" and index == 1 and accelerator.process_index == 1):
                with torch.no_grad():
                    model(batch)
        engine.zero_grad()
        found = weights(accelerator, model)
        accelerator.free_memory()
        return found


def test_evaluation_between_micro_batches(two_ranks: RankGroup) -> None:
    alone, with_evaluation = (two_ranks.run(evaluated, at) for at in ("no rank", "all ranks"))
    assert alone == with_evaluation
    two_ranks.run(evaluated, "a forward without a backward")
    message = r"^RankDisagreementError: .*\n  rank 0: begins .*\n  rank 1: runs a forward without gradients"
    assert_fails(two_ranks, message, evaluated, "one rank")


def rounds_of_agreement() -> list[int]:
    """Rounds for each window of four blocks."""
    with fresh():
        accelerator, model, optimizer, loader, _ = prepare(Loop(plugin={"zero_stage": 3}, n=4))
        channel = accelerator.deepspeed_engine_wrapped.engine.agreement._channel
        before, found = channel.rounds, []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                found.append(channel.rounds - before)
                before = channel.rounds
        return found


def test_a_forward_needs_no_agreement_beside_that_of_its_request(two_ranks: RankGroup) -> None:
    """And the step none at all, as at the other stages. The first backward of an engine agrees on the order, in two."""
    assert two_ranks.run(rounds_of_agreement) == [[2 + 4, 4]] * 2
