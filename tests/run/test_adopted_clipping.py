"""PyTorch's clipping in a program for DeepSpeed that ``requestzero.run`` has started."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from torch.nn.utils import clip_grad_norm_

from requestzero.run.adoption import Adoption
from support.engines import build, module_weights
from support.ranks import RankGroup
from support.setup import Setup
from support.windows import ALL, LR, Micro, backward

LIMIT = 0.125


def adopted(setup: Setup) -> Any:
    """The engine that the program gets of ``deepspeed.initialize``."""
    import deepspeed

    with patch.object(deepspeed, "initialize", deepspeed.initialize):
        Adoption()._adopt_deepspeed(deepspeed)
        return build(setup, requestzero=False)


def clipped(managed: bool) -> tuple[float, float, float]:
    """The norm before the step, that of the step, and how far the weights have moved."""
    engine = adopted(Setup(managed=managed, config={"gradient_accumulation_steps": 2}))
    before = module_weights(engine)
    backward(engine, Micro(ALL, 1), mark=False)
    if managed:
        with pytest.raises(RuntimeError, match="not the last of gradient_accumulation"):
            clip_grad_norm_(engine.module.parameters(), LIMIT)
        engine.step()
    backward(engine, Micro(ALL, 2), mark=False)
    norm = float(clip_grad_norm_(engine.module.parameters(), LIMIT))
    engine.step()
    moved = sum(float((a - b).square().sum()) for a, b in zip(module_weights(engine), before, strict=True)) ** 0.5
    found = norm, float(engine.get_global_grad_norm()), moved / LR
    engine.destroy()
    return found


@pytest.mark.parametrize("managed", [True, False])
def test_it_clips_what_the_step_applies(two_ranks: RankGroup, managed: bool) -> None:
    for norm, reported, moved in two_ranks.run(clipped, managed):
        assert norm == pytest.approx(reported, rel=1e-6)
        assert norm > LIMIT
        assert moved == pytest.approx(LIMIT, rel=1e-4)
