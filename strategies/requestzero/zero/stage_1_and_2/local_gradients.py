"""Where the unreduced gradient of a parameter waits: on the parameter itself, in one of two attributes."""

from __future__ import annotations

from typing import Any

import torch


class LocalGradients:
    """Gradients of this rank's micro-batches before their reduction.

    Autograd adds into ``param.grad``. What waits beyond its backward is kept in ``param.grad_accum``, which is
    DeepSpeed's name for it: the sum of several micro-batches, in the dtype of the accumulation. ``safe_get_full_grad``
    would take ``param.grad`` for the gradient of all ranks.

    Args:
        dtype: of those sums.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._owned: set[int] = set()  # ids of parameters whose sum shares its memory with nothing
        self.nbytes = self.peak_nbytes = 0
        """Bytes of the sums that wait now, and the most there have been."""

    def accumulate(self, param: Any) -> None:
        """Move ``param.grad`` to where sums wait. A lone one keeps its dtype; the second widens the sum."""
        gradient = param.grad
        if gradient is None:
            return
        total, param.grad = param.grad_accum, None
        if total is not None and id(param) in self._owned:  # first: this runs for every gradient
            total.add_(gradient)
            return
        param.grad_accum = gradient if total is None else self._sum(param, total, gradient)
        self.nbytes += param.grad_accum.nbytes - (0 if total is None else total.nbytes)
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def _sum(self, param: Any, total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of the first two gradients in memory of its own."""
        self._owned.add(id(param))
        if total.dtype != self._dtype:
            return total.to(self._dtype).add_(gradient)
        # Not in place: autograd hands out gradients that share memory.
        return (total + gradient).to(self._dtype)

    def waits(self, param: Any) -> bool:
        """Return whether the parameter has a gradient, complete, that is not reduced yet.

        DeepSpeed marks a gradient as not ready that a tiled computation has not finished adding up.
        """
        return not self.is_absent(param) and getattr(param, "ds_grad_is_ready", True)

    def is_absent(self, param: Any) -> bool:
        """Return whether the parameter has had no gradient since the last reduction."""
        return param.grad_accum is None and param.grad is None

    def take(self, param: Any) -> torch.Tensor:
        """Remove the waiting gradient from the parameter and return it, of the parameter's shape."""
        if param.grad_accum is None:
            gradient: torch.Tensor = param.grad
            param.grad = None
        else:
            self.accumulate(param)
            gradient = param.grad_accum
            self._drop_sum(param)
        return gradient

    def put_zeros(self, param: Any, dtype: torch.dtype) -> None:
        """Let the parameter have a gradient of zeros."""
        param.grad_accum = torch.zeros_like(param, dtype=dtype)
        self.nbytes += param.grad_accum.nbytes

    def clear(self, param: Any) -> None:
        """Drop what waits on the parameter."""
        param.grad = None
        self._drop_sum(param)

    def move(self, param: Any, device: Any) -> None:
        """Move the sum that waits on the parameter, if there is one."""
        if param.grad_accum is not None:
            param.grad_accum = param.grad_accum.to(device)

    def _drop_sum(self, param: Any) -> None:
        if param.grad_accum is not None:
            self.nbytes -= param.grad_accum.nbytes
            param.grad_accum = None
        self._owned.discard(id(param))
