"""Random states of the ranks, so that a resumed run draws the numbers of the uninterrupted one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

RandomState = dict[str, Any]
"""States of one rank's generators: of Python, NumPy, PyTorch and, on a GPU, its device."""


def collect(device: torch.device) -> list[RandomState]:
    """Return the states of all ranks, in rank order. Collective."""
    kind, keys, *rest = np.random.get_state()
    state: RandomState = {
        "python": random.getstate(),
        # Plain lists, since a checkpoint may be read with a loader that takes no numpy arrays.
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def restore(state: RandomState, device: torch.device) -> None:
    """Set this rank's generators to ``state``."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
