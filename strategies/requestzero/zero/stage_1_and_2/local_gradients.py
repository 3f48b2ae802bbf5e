"""Where the unreduced gradient of a parameter waits: on the parameter itself, in one of two attributes."""

from __future__ import annotations

from typing import Any

import torch


class LocalGradients:
    """Gradients of this rank's micro-batches before their reduction.

    Autograd adds into ``param.grad``. At stage 1 with an accumulation dtype of its own, the sum of several
    micro-batches is kept in ``param.grad_accum``, which is DeepSpeed's name for it.

    Args:
        separate: keep sums in ``param.grad_accum``.
        dtype: of those sums.
    """

    def __init__(self, separate: bool, dtype: torch.dtype) -> None:
        self._separate, self._dtype = separate, dtype
        self._attribute = "grad_accum" if separate else "grad"

    def accumulate(self, param: Any) -> None:
        """Move ``param.grad`` to where gradients wait. A lone one keeps its dtype; the second widens the sum."""
        if not self._separate or param.grad is None:
            return
        gradient, total = param.grad, param.grad_accum
        param.grad_accum = gradient if total is None else total.to(self._dtype).add_(gradient)
        param.grad = None

    def waits(self, param: Any) -> bool:
        """Return whether the parameter has a gradient, complete, that is not reduced yet.

        DeepSpeed marks a gradient as not ready that a tiled computation has not finished adding up.
        """
        return getattr(param, self._attribute) is not None and getattr(param, "ds_grad_is_ready", True)

    def is_absent(self, param: Any) -> bool:
        """Return whether the parameter has had no gradient since the last reduction."""
        return getattr(param, self._attribute) is None

    def take(self, param: Any) -> torch.Tensor:
        """Remove the waiting gradient from the parameter and return it, of the parameter's shape."""
        gradient: torch.Tensor = getattr(param, self._attribute)
        setattr(param, self._attribute, None)
        return gradient

    def put_zeros(self, param: Any) -> None:
        """Let the parameter have a gradient of zeros."""
        setattr(param, self._attribute, torch.zeros_like(param, dtype=self._dtype if self._separate else None))

    def clear(self, param: Any) -> None:
        """Drop what waits on the parameter."""
        param.grad = None
        param.grad_accum = None
