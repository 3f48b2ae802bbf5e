"""The state of random number generators, so that a resumed run draws what the uninterrupted one draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

RandomState = dict[str, Any]


def collect(device: torch.device) -> list[RandomState]:
    """The states of all ranks, in rank order. Collective."""
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
    """Put this rank's generators into ``state``."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
