"""Loops that leave a window before its step make the updates that they make without DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest

from support.accelerate_loops import Loop, prepare, weights
from support.accelerate_state import fresh
from support.ranks import RankGroup


def leave(plugin: dict[str, Any] | None, where: str, at: tuple[int, ...]) -> list[list[float]]:
    """Weights after every block; ``where``: the place in the block that those ``at`` are left from."""
    with fresh():
        accelerator, model, optimizer, loader, scheduler = prepare(Loop(plugin=plugin, n=2, batches=8))
        found = []
        for epoch in range(2):
            for index, batch in enumerate(loader):
                with accelerator.accumulate(model):
                    left = index + 8 * epoch in at
                    if left and where == "before the backward":
                        continue
                    accelerator.backward(model(batch))
                    if left and where == "before the step":
                        continue
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                found.append(weights(accelerator, model))
                if left and where == "the pass":
                    break
        accelerator.free_memory()
        return found


@pytest.mark.parametrize("plugin", [{"zero_stage": 1}, {}, {"zero_stage": 3}])
@pytest.mark.parametrize(
    ("where", "at"),
    [
        ("before the backward", (1,)),
        ("before the backward", (0, 5, 7)),
        ("before the step", (3, 9)),
        ("the pass", (4, 13)),
        ("the pass", (5,)),
    ],
)
def test_updates_are_those_of_ddp(
    two_ranks: RankGroup, plugin: dict[str, Any], where: str, at: tuple[int, ...]
) -> None:
    assert two_ranks.run(leave, plugin, where, at) == two_ranks.run(leave, None, where, at)
