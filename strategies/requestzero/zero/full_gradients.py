"""The window's gradient as PyTorch has it: whole, divided, in ``param.grad``; and changes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from deepspeed.utils.tensor_fragment import safe_get_full_grad, safe_set_full_grad

if TYPE_CHECKING:
    from requestzero.zero.engine import RequestZeROEngine


@contextmanager
def full_gradients(engine: RequestZeROEngine, normalization: str) -> Iterator[None]:
    """Let every parameter have the open window's gradient in ``param.grad`` within the block. Collective.

    It is summed over the window, averaged over ranks and divided as the step will divide it, in the parameter's dtype.
    What the block makes of it is what the step applies: in-place changes, another tensor, or ``None``, which is zero.
    Each rank holds the whole gradient meanwhile. Nothing happens where no gradients are pending. The open request ends.

    Args:
        engine: whose window.
        normalization: see ``engine.step``.
    """
    scale = engine.prepare_divisor(normalization) if engine.has_pending_gradients else None
    if scale is None:
        yield
        return
    params = [param for param in engine.optimizer.layout.params if param.numel()]
    whole = [safe_get_full_grad(param) for param in params]  # all of them first: it would return param.grad
    for param, gradient in zip(params, whole, strict=True):
        assert gradient is not None
        param.grad = (gradient / scale).to(param.dtype)
    del whole
    given = [(param.grad, _version(param.grad)) for param in params]
    try:
        yield
    finally:
        changed = [
            param.grad is not each or _version(each) != old for param, (each, old) in zip(params, given, strict=True)
        ]
        left = [param.grad for param in params]
        for param in params:
            param.grad = None
    _, accumulated = engine.get_data_types()
    for param, gradient, is_changed in zip(params, left, changed, strict=True):
        if is_changed:
            new = torch.zeros_like(param) if gradient is None else gradient
            safe_set_full_grad(param, new.detach().to(accumulated) * scale)


def _version(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
