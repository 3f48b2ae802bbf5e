"""The window's gradient as PyTorch has it: whole, divided, in ``param.grad``; and changes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from deepspeed.utils.tensor_fragment import safe_get_full_grad, safe_set_full_grad
from torch.nn.utils import clip_grads_with_norm_

from requestzero.zero.common.life_cycle import pending_norm
from requestzero.zero.stage_1_and_2.layout import PartitionLayout

if TYPE_CHECKING:
    from requestzero.zero.engine import RequestZeROEngine


@contextmanager
def full_gradients(
    engine: RequestZeROEngine, *, divisor: float | None = None, normalization: str | None = None
) -> Iterator[None]:
    """Let every parameter have the open window's gradient in ``param.grad`` within the block. Collective.

    It is summed over the window, averaged over ranks and divided as the step will divide it, in the parameter's dtype.
    What the block makes of it is what the step applies: in-place changes (also through ``param.grad.data``), another
    tensor, or ``None``, which is zero. Where the loop has asked the step to clip, it is clipped already, as in PyTorch.
    Each rank holds the whole gradient meanwhile. Nothing happens where no gradients are pending. The open request ends.
    For stages 1 and 2.

    Args:
        engine: whose window.
        divisor: as the step will be given it; see ``engine.step``.
        normalization: likewise.
    """
    scale = engine.prepare_divisor(divisor, normalization) if engine.has_pending_gradients else None
    if scale is None:
        with _shows_gradients(engine):  # there are none, or of a window without weight, which the step leaves out
            yield
        return
    max_norm = engine.next_step_clipping.take(engine.update_window)
    if max_norm is not None:
        norm = pending_norm(engine.optimizer)
        with _shown(engine, scale) as params:
            clip_grads_with_norm_(params, max_norm, norm)
    with _shown(engine, scale):
        yield


@contextmanager
def _shown(engine: RequestZeROEngine, scale: float) -> Iterator[Sequence[torch.nn.Parameter]]:
    """Show the window's sum, divided by ``scale``, in the block, and write back what it has changed. Collective."""
    params = [param for param in engine.optimizer.layout.params if param.numel()]
    whole = [safe_get_full_grad(param) for param in params]  # all of them first: it would return param.grad
    for param, gradient in zip(params, whole, strict=True):
        assert gradient is not None
        param.grad = (gradient / scale).to(param.dtype)
    del whole
    given = [_own_part(engine, param, param.grad).clone() for param in params]
    try:
        with _shows_gradients(engine):
            yield params
    finally:
        left = [param.grad for param in params]
        for param in params:
            param.grad = None
    _, accumulated = engine.get_data_types()
    new = [torch.zeros_like(param) if each is None else each.detach() for param, each in zip(params, left, strict=True)]
    now = [_own_part(engine, param, gradient) for param, gradient in zip(params, new, strict=True)]
    for param, gradient, changed in zip(params, new, _differ(given, now), strict=True):
        if changed:
            safe_set_full_grad(param, gradient.to(accumulated) * scale)


@contextmanager
def _shows_gradients(engine: RequestZeROEngine) -> Iterator[None]:
    """Say that ``param.grad`` is what the window has: PyTorch's functions act on it in the block."""
    engine.shows_gradients = True
    try:
        yield
    finally:
        engine.shows_gradients = False


def _own_part(engine: RequestZeROEngine, param: torch.nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return the part of a gradient that this rank's partition has, which is all that it writes."""
    layout = engine.optimizer.layout
    assert isinstance(layout, PartitionLayout)
    param_id = layout.id_of(param)
    place = layout.groups[layout.group_of[param_id]].owned.get(param_id)
    assert gradient is not None
    flat = gradient.detach().flatten()
    return flat[:0] if place is None else flat[place.start : place.start + place.numel]


def _differ(given: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> list[bool]:
    """Return which have other values; the values, as changes through ``.data`` leave no other trace."""
    if not given:
        return []
    result: list[bool] = torch.stack([(a != b).any() for a, b in zip(given, now, strict=True)]).tolist()
    return result
