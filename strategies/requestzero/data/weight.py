"""Weights of micro-batches: what ``normalization="token"`` divides by the sum of."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def check_weight(weight: Any) -> None:
    """Raise ValueError unless this can be a weight: a number of at least 0, or a tensor with one real element.

    A tensor is not read here, which would wait for the device: ``step`` judges what has been added up.
    """
    if hasattr(weight, "numel"):
        if weight.numel() == 1 and str(weight.dtype) != "torch.bool" and not weight.is_complex():
            return
        given = f"a tensor of shape {list(weight.shape)} and dtype {str(weight.dtype).removeprefix('torch.')}"
    else:
        number = isinstance(weight, Real) and not isinstance(weight, bool)
        if number and math.isfinite(weight) and weight >= 0:
            return
        given = repr(weight)
    raise ValueError(
        f"weight={given} is not allowed: use a finite number of at least 0, such as the micro-batch's number of "
        "trainable tokens, or a tensor that holds one."
    )
