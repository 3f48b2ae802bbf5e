"""What DeepSpeed mixes up between parameter groups when it loads a universal checkpoint at stage 3."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT

from requestzero.zero.checkpoint.files import read_states


def separate_groups(optimizer: torch.optim.Optimizer, masters: Iterable[torch.Tensor], folder: Path) -> None:
    """Give every parameter group its own saved hyperparameters, and every sub-group its own count of steps.

    DeepSpeed 0.19.8 gives all groups the hyperparameters of the first one, such as its weight decay, and all sub-groups
    one tensor to count steps in, which each of them then increments.

    Args:
        optimizer: the user's.
        masters: flat master weights of every sub-group.
        folder: of the checkpoint's tag.
    """
    saved = read_states(folder / "zero" / "optimizer_state.pt")[OPTIMIZER_STATE_DICT]["param_groups"]
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update({name: value for name, value in values.items() if name != "params"})
    for master in masters:
        step = optimizer.state[master].get("step")
        if torch.is_tensor(step):
            optimizer.state[master]["step"] = step.clone()
