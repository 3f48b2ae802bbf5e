"""Gradients that a loop for Accelerate clips, and weights that it writes, count as without DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from support.accelerate_loops import Loop, data, make_accelerator
from support.accelerate_state import fresh
from support.failures import assert_fails
from support.models import WIDTH
from support.ranks import RankGroup
from support.whole_weights import whole

LIMIT = 0.05

Act = Callable[[Any, torch.nn.Module], Any]
"""With the accelerator and the model."""


def nothing(accelerator: Any, model: torch.nn.Module) -> float:
    return 0.0


def some_by_norm(accelerator: Any, model: torch.nn.Module) -> float:
    return float(clip_grad_norm_(list(model.parameters())[:2], LIMIT))


def by_another_norm(accelerator: Any, model: torch.nn.Module) -> float:
    return float(clip_grad_norm_(model.parameters(), LIMIT, norm_type=1.0))


def by_value(accelerator: Any, model: torch.nn.Module) -> float:
    clip_grad_value_(model.parameters(), LIMIT)
    return 0.0


def some_by_accelerator(accelerator: Any, model: torch.nn.Module) -> float:
    return float(accelerator.clip_grad_norm_(list(model.parameters())[:2], LIMIT))


def by_another_norm_of_accelerator(accelerator: Any, model: torch.nn.Module) -> float:
    return float(accelerator.clip_grad_norm_(model.parameters(), LIMIT, norm_type=1.0))


def some_and_then_all(accelerator: Any, model: torch.nn.Module) -> float:
    return some_by_accelerator(accelerator, model) + float(accelerator.clip_grad_norm_(model.parameters(), LIMIT))


def by_value_of_accelerator(accelerator: Any, model: torch.nn.Module) -> float:
    accelerator.clip_grad_value_(model.parameters(), LIMIT)
    return 0.0


def clamp_weights(accelerator: Any, model: torch.nn.Module) -> None:
    """On the first rank where they are gathered, else on every rank."""
    import deepspeed

    params = list(model.parameters())
    is_sharded = hasattr(params[0], "ds_id")
    with deepspeed.zero.GatheredParameters(params, modifier_rank=0, enabled=is_sharded):
        if torch.distributed.get_rank() == 0 or not is_sharded:
            for parameter in params:
                parameter.data.clamp_(-0.125, 0.125)


def trained(plugin: dict[str, Any] | None, before_step: Act, after_step: Act = nothing) -> list[float]:
    """Norms before, and weights after four updates of two micro-batches each."""
    with fresh():
        accelerator = make_accelerator(Loop(plugin=plugin, n=2))
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4), torch.nn.Linear(4, 1))
        loader = torch.utils.data.DataLoader(data(8, accelerator.num_processes), batch_size=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        found: list[float] = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                if accelerator.sync_gradients:
                    found.append(before_step(accelerator, model))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                after_step(accelerator, model)
        with whole(model.parameters()):
            found += torch.cat([p.detach().flatten().cpu() for p in model.parameters()]).tolist()
        accelerator.free_memory()
        return found


OF_PYTORCH = [some_by_norm, by_another_norm, by_value]
OF_ACCELERATE = [some_by_accelerator, by_another_norm_of_accelerator, by_value_of_accelerator]


@pytest.mark.parametrize("clip", [*OF_PYTORCH, *OF_ACCELERATE, some_and_then_all])
def test_clips_are_those_of_ddp(two_ranks: RankGroup, clip: Act) -> None:
    expected = two_ranks.run(trained, None, clip)
    assert expected != two_ranks.run(trained, None, nothing)
    for plugin in ({"zero_stage": 1}, {"zero_stage": 2}):
        for ours, plain in zip(two_ranks.run(trained, plugin, clip), expected, strict=True):
            assert ours == pytest.approx(plain, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("clip", [*OF_PYTORCH, *OF_ACCELERATE])
def test_stage_3_refuses_them(two_ranks: RankGroup, clip: Act) -> None:
    message = r"^NotImplementedError: (torch.nn.utils|accelerator).clip_grad_\w* is not possible at stage 3"
    assert_fails(two_ranks, message, trained, {"zero_stage": 3}, clip)


def test_written_weights_count_as_under_ddp(two_ranks: RankGroup) -> None:
    expected = two_ranks.run(trained, None, nothing, clamp_weights)
    assert expected != two_ranks.run(trained, None, nothing)
    for stage in (1, 2, 3):
        for ours, plain in zip(
            two_ranks.run(trained, {"zero_stage": stage}, nothing, clamp_weights), expected, strict=True
        ):
            assert ours == pytest.approx(plain, rel=1e-5, abs=1e-7)
