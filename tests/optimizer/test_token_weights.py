"""``normalization="token"``: the window's total loss over all ranks, divided by its total weight, however it is cut."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from counting import Operators
from ranks import RankGroup
from sequences import RANKS, SIZES, Sequence, Sliced, cut, draw, reference, run_window
from windows import Fp16OnCpu, Setup, build, masters

LR, MOMENTUM = 0.5, 0.5
DTYPES = [("fp32", "fp32", {}), ("bf16", "fp32", {}), ("bf16", "bf16", {})]
FP16 = ("fp16", "fp32", {"fp16": {"enabled": True, "loss_scale": 16.0}})
PLACES = [(stage, offload) for stage in (1, 2) for offload in (False, True)]
every_place = pytest.mark.parametrize(("stage", "offload"), PLACES)


def build_sliced(setup: Setup) -> Any:
    def sgd(groups: Any, lr: float) -> torch.optim.Optimizer:
        return SGD(groups, lr=lr, momentum=MOMENTUM)

    SGD = torch.optim.SGD
    with patch("torch.optim.SGD", sgd):
        return build(setup, model=Sliced(), lr=LR)


def flat(engine: Any) -> torch.Tensor:
    return torch.cat([master.flatten() for master in masters(engine)])


# --- invariance -----------------------------------------------------------------------------------------------------

WINDOWS = [
    draw(1, 24),
    draw(2, 24),
    [Sequence((12,) * sum(SIZES), 0)],  # a total weight of zero: nothing happens, whatever the gradient
    draw(1, 24),  # the first one's sequences, cut in another way
    draw(3, 96),
]


def invariant(setup: Setup, windows: list[list[Sequence]], cuts: int) -> list[torch.Tensor]:
    """The weights after each window; windows are cut by seeds that differ from window to window and call to call."""
    import deepspeed.comm as dist

    found = []
    with Fp16OnCpu() if setup.model == "fp16" else nullcontext(), warnings.catch_warnings(action="ignore"):
        engine = build_sliced(setup)
        for number, window in enumerate(windows):
            requests = cut(window, dist.get_world_size(), 100 * cuts + number)
            run_window(engine, requests, dist.get_rank(), as_tensor=bool(number % 2))
            engine.step(normalization="token")
            weight = sum(s.tokens for s in window)
            gradient = torch.tensor([s.values for s in window]).sum(0).double() / max(weight, 1)
            assert engine.was_step_applied() is (weight > 0)
            if weight:
                assert float(engine.get_global_grad_norm()) == pytest.approx(float(gradient.norm()), rel=1e-6)
            assert not engine.update_window.is_open
            found.append(flat(engine))
        assert (engine.empty_updates, engine.applied_updates, engine.skipped_steps) == (1, len(windows) - 1, 0)
        engine.destroy()
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_the_update_does_not_depend_on_the_cut(ranks: int, request: pytest.FixtureRequest) -> None:
    """Bit for bit: stages, offload, dtypes, requests, micro-batches, ranks, order, fillers, empty requests."""
    group: RankGroup = request.getfixturevalue(f"{('one', 'two', 'three', 'four')[ranks - 1]}_rank{'s' * (ranks > 1)}")
    wanted = reference(WINDOWS, LR, MOMENTUM)
    for number, (model, accum, config) in enumerate([*DTYPES, FP16]):
        for place, (stage, offload) in enumerate(PLACES):
            setup = Setup(stage=stage, offload=offload, model=model, accum=accum, config=config)
            for rank, found in enumerate(group.run(invariant, setup, WINDOWS, 4 * number + place)):
                for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
                    assert torch.equal(a, b), f"{setup} rank {rank} window {index}"
