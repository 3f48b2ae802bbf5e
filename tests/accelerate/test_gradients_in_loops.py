"""``plugin.gradients(accelerator)``: a loop reads and changes the window's gradient, as without DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from support.accelerate_loops import Loop, data, make_accelerator, weights
from support.accelerate_state import fresh
from support.failures import assert_fails
from support.models import RowWeight
from support.ranks import RankGroup

WINDOW = 2


def read(gradient: torch.Tensor) -> torch.Tensor:
    return gradient


def in_place(gradient: torch.Tensor) -> torch.Tensor:
    gradient.mul_(0.5)
    gradient.data[0] = 3.0
    return gradient


def another_tensor(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.25, 0.25)


def nothing_left(gradient: torch.Tensor) -> None:
    return None


def signs(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.sign()


Edit = Callable[[torch.Tensor], "torch.Tensor | None"]


def trained(plugin: dict[str, Any] | None, edit: Edit, clips: bool = False) -> list[Any]:
    """The gradients that the loop sees, and the weights at the end; ``clips``: in the block too, in both ways."""
    with fresh():
        accelerator = make_accelerator(Loop(plugin=plugin, n=WINDOW))
        model: Any = RowWeight()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        loader: Any = torch.utils.data.DataLoader(data(6, accelerator.num_processes), batch_size=1)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        found: list[Any] = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                if accelerator.sync_gradients:
                    ours = accelerator.deepspeed_plugin
                    with nullcontext() if ours is None else ours.gradients(accelerator):
                        for parameter in model.parameters():
                            found.append(parameter.grad.tolist())
                            parameter.grad = edit(parameter.grad)
                        if clips:
                            found.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                            accelerator.clip_grad_value_(model.parameters(), 0.25)
                optimizer.step()
                optimizer.zero_grad()
        return [*found, weights(accelerator, model)]


@pytest.mark.parametrize("edit", [read, in_place, another_tensor, nothing_left, signs])
def test_what_is_read_and_changed_is_that_of_ddp_bit_for_bit(two_ranks: RankGroup, edit: Edit) -> None:
    expected = two_ranks.run(trained, None, edit)
    assert len(expected[0]) == 4
    for stage in (1, 2):
        assert two_ranks.run(trained, {"zero_stage": stage}, edit) == expected
    offload = {
        "zero_stage": 2,
        "offload_optimizer_device": "cpu",
        "hf_ds_config": {"zero_force_ds_cpu_optimizer": False},
    }
    assert two_ranks.run(trained, offload, edit) == expected


def test_clips_in_the_block_are_those_of_what_was_changed(two_ranks: RankGroup) -> None:
    expected = two_ranks.run(trained, None, in_place, clips=True)
    for ours, plain in zip(two_ranks.run(trained, {"zero_stage": 2}, in_place, clips=True), expected, strict=True):
        for one, other in zip(ours, plain, strict=True):
            assert one == pytest.approx(other, rel=1e-6)


def test_stage_3_says_what_to_do(two_ranks: RankGroup) -> None:
    message = (
        r"^NotImplementedError: plugin.gradients\(\) is not possible at stage 3.*deepspeed.utils.safe_get_full_grad"
    )
    assert_fails(two_ranks, message, trained, {"zero_stage": 3}, read)


def before_prepare() -> None:
    with fresh():
        accelerator = make_accelerator(Loop(plugin={}))
        plugin: Any = accelerator.deepspeed_plugin
        with plugin.gradients(accelerator):
            pass


def prepared() -> tuple[Any, Any, Any, Any]:
    """An Accelerator, its plugin, and what it has prepared: a model and its optimizer."""
    accelerator = make_accelerator(Loop(plugin={}))
    model: Any = RowWeight()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return accelerator, accelerator.deepspeed_plugin, model, optimizer


def inside_a_request() -> None:
    with fresh():
        accelerator, plugin, model, _ = prepared()
        with plugin.requests(accelerator).request():
            accelerator.backward(model(data(1, 1)))
            with plugin.gradients(accelerator):
                pass


def step_in_the_block() -> None:
    with fresh():
        accelerator, plugin, model, optimizer = prepared()
        accelerator.backward(model(data(1, 1)))
        with plugin.gradients(accelerator):
            optimizer.step()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (step_in_the_block, r"^RuntimeError: step\(\) in a block that shows the window's gradient .* after the block"),
        (before_prepare, "^RuntimeError: This Accelerator has not prepared a model"),
        (inside_a_request, r"^RuntimeError: plugin.gradients\(\) inside a request: gradients are complete at its end"),
    ],
)
def test_it_needs_gradients_that_are_complete(two_ranks: RankGroup, program: Any, message: str) -> None:
    assert_fails(two_ranks, message, program)
