"""Optimizers that evaluate with other weights than they train: the model's weights follow, and so do checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from requestzero import initialize
from support.engines import build, masters, module_weights
from support.ranks import RankGroup
from support.setup import Setup
from support.stage_3 import GATHERED, PARAMS
from support.windows import LR, Layers
from support.written_weights import set_masters_beyond_bf16, window


class Exchanging(torch.optim.SGD):
    """As schedule-free optimizers, whose methods change ``group["params"]`` in place."""

    def eval(self) -> None:
        self._add(1.0)

    def train(self) -> None:
        self._add(-1.0)

    def _add(self, value: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(value)


def wrong_after_exchanges(setup: Setup, folder: str, own: bool) -> list[str]:
    """Names of what is not as in plain PyTorch, when the user's optimizer is called or else the engine's."""
    torch.manual_seed(0)
    module: Any = Layers()
    optimizer = Exchanging(module.parameters(), lr=LR)
    engine: Any = initialize(model=module, optimizer=optimizer, config=setup.deepspeed_config())[0]
    called: Any = optimizer if own else engine.optimizer
    set_masters_beyond_bf16(engine)
    window(engine, 0)
    trained = masters(engine)
    seen: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    called.eval()
    evaluated = [master + 1.0 for master in trained]
    seen["masters"] = masters(engine), evaluated
    dtype = next(module.parameters()).dtype
    seen["weights"] = module_weights(engine), [weight.to(dtype).float() for weight in evaluated]
    engine.save_checkpoint(folder)
    seen["masters after a save"] = masters(engine), evaluated

    called.train()
    gradients = window(engine, 1)
    seen["update"] = masters(engine), [m - LR * g for m, g in zip(trained, gradients, strict=True)]
    engine.load_checkpoint(folder)
    seen["checkpoint"] = masters(engine), evaluated
    engine.destroy()
    optimizer.eval()  # harmless without its engine
    return [name for name, lists in seen.items() if not all(torch.equal(a, b) for a, b in zip(*lists, strict=True))]


@pytest.mark.parametrize("own", [False, True], ids=["of the engine", "of the user"])
@pytest.mark.parametrize(
    "setup",
    [
        Setup(2, model="bf16"),
        Setup(3, model="bf16"),
        Setup(3, model="fp32", groups=2),
        Setup(3, model="bf16", offload=True, zero={**PARAMS, **GATHERED, "sub_group_size": 8}),
    ],
    ids=str,
)
def test_weights_follow_exchanged_masters(two_ranks: RankGroup, tmp_path: Path, setup: Setup, own: bool) -> None:
    assert two_ranks.run(wrong_after_exchanges, setup, str(tmp_path), own) == [[], []]


def methods_of(setup: Setup) -> list[bool]:
    engine = build(setup)
    found = [hasattr(engine.optimizer, name) for name in ("train", "eval")]
    engine.destroy()
    return found


def test_other_optimizers_get_no_such_methods(two_ranks: RankGroup) -> None:
    assert two_ranks.run(methods_of, Setup(3)) == [[False, False]] * 2
