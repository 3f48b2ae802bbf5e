"""Norms of gradients, as scalars on their device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from deepspeed.runtime.zero.utils import get_norm_dtype

# Elements whose norm is computed at a time: bounds the widened copy to 32 MiB in fp64.
_CHUNK = 2**22


def vector_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm of a contiguous gradient in DeepSpeed's dtype for norms (fp64 where there is one)."""
    dtype = get_norm_dtype()
    if gradient.numel() <= _CHUNK:
        return torch.linalg.vector_norm(gradient, dtype=dtype)
    pieces = gradient.view(-1).split(_CHUNK)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(piece, dtype=dtype) for piece in pieces]))


def vector_norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return :func:`vector_norm` of each, with one operator for all but the large ones."""
    small = [gradient for gradient in gradients if gradient.numel() <= _CHUNK]
    norms = iter(torch._foreach_norm(small, 2, dtype=get_norm_dtype()) if small else ())
    return [next(norms) if grad.numel() <= _CHUNK else vector_norm(grad) for grad in gradients]


def square_of(norms: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the sum of squared norms, a scalar on their device; ``None`` for no norms."""
    if not norms:
        return None
    return norms[0].square() if len(norms) == 1 else torch.stack(list(norms)).square().sum()


def cause_of_overflow(squares: Iterable[float]) -> str | None:
    """Return ``"NaN"`` or ``"inf"``, whichever is among squared norms, or ``None`` where all are finite."""
    total = sum(squares)
    return None if math.isfinite(total) else "NaN" if math.isnan(total) else "inf"
