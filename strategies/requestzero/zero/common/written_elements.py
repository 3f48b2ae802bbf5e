"""Elements of weights that were written since the last step, found by comparing them with their master weights."""

from __future__ import annotations

import numpy as np
import torch

_CHUNK = 1 << 24
"""Elements that are compared at once, which limits the temporary memory (112 MB with fp32 masters)."""


def adopt_elements(weights: torch.Tensor, masters: torch.Tensor, start: int, stop: int) -> None:
    """Let masters take over the elements of weights that they do not round to, from ``start`` to ``stop``; flat."""
    for begin in range(start, stop, _CHUNK):
        end = min(begin + _CHUNK, stop)
        old = part_of(masters, begin, end)
        # The host waits only for what it reads itself.
        new = part_of(weights, begin, end).to(old.device, non_blocking=old.device.type != "cpu")
        rounded = old.to(new.dtype)
        if old.device.type != "cpu" or not _same_bits(rounded, new):
            torch.where(rounded == new, old, new, out=old)


def part_of(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return elements of flat memory as a view; without an operator where that is all of it, as it mostly is."""
    return flat if stop - start == len(flat) else flat[start:stop]


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two CPU tensors of one dtype hold the same bits; NumPy compares five times as fast as PyTorch."""
    return np.array_equal(first.view(torch.int16).numpy(), second.view(torch.int16).numpy())
