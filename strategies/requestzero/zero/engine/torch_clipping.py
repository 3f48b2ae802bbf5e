"""``torch.nn.utils.clip_grad_norm_`` and its like, for parameters whose gradients an engine keeps.

Between backward and step ``param.grad`` is empty under ZeRO, so that PyTorch's functions would clip nothing, without a
word. Here they clip the window's gradient, where the loop's next step is known, and raise where it is not. Calls for
other parameters, for a window without gradients, or where ``param.grad`` holds the gradient, are PyTorch's own.

HACK: programs import these functions by name before there is any engine, so that nothing in the place of a name would
reach them. Each is a closure over the function that does the work (PyTorch's ``_no_grad``). The first engine puts
another function into that cell, and PyTorch's own comes back when the last one is destroyed. Written for PyTorch 2.9 to
2.15.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import CellType
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch.nn.utils import clip_grad

from requestzero.zero.common.clipped_parameters import TrainsParameters, without_local
from requestzero.zero.common.user_line import stacklevel_of_user

_NORM, _VALUE, _BY_GIVEN_NORM = "clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_"


class Clipping(Protocol):
    """A loop's way to clip; see ``LoopClipping``."""

    def of_parameters(
        self,
        call: str,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor: ...

    def whole_gradients(self, call: str) -> AbstractContextManager[None]: ...


class KeepsGradients(TrainsParameters, Protocol):
    """An engine whose windows hold the gradients of its parameters."""

    loop_clipping: Clipping | None
    shows_gradients: bool

    @property
    def has_pending_gradients(self) -> bool: ...


_engines: WeakValueDictionary[int, KeepsGradients] = WeakValueDictionary()
"""In the order in which they were built, which is that of all ranks."""
_numbers = itertools.count()
_swapped: list[tuple[CellType, Callable[..., Any]]] = []
"""Cells that hold our function, each with PyTorch's."""


def serve(engine: KeepsGradients) -> None:
    """Let PyTorch's functions clip the gradients that an engine keeps, until :func:`leave`."""
    if not _swapped:
        _install()
    _engines[next(_numbers)] = engine


def leave(engine: KeepsGradients) -> None:
    """Let PyTorch's functions know nothing of a destroyed engine."""
    for number, each in [*_engines.items()]:
        if each is engine:
            del _engines[number]
    if not _engines:
        _restore()


def _install() -> None:
    for name in (_NORM, _VALUE, _BY_GIVEN_NORM):
        function = getattr(clip_grad, name)
        original: Any = getattr(function, "__wrapped__", None)
        cells = [cell for cell in function.__closure__ or () if original is not None and _content(cell) is original]
        for cell in cells:
            cell.cell_contents = partial(_clip, original)
            _swapped.append((cell, original))
        if not cells:
            warnings.warn(
                f"torch.nn.utils.{name} of PyTorch {torch.__version__} is not the function that requestzero knows: for "
                "parameters of an engine it does nothing. Use gradient_clipping of the DeepSpeed config.",
                stacklevel=stacklevel_of_user(),
            )


def _content(cell: CellType) -> Any:
    """Return what a cell holds, ``None`` for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _restore() -> None:
    while _swapped:
        cell, original = _swapped.pop()
        cell.cell_contents = original


def _clip(
    original: Callable[..., Any], parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
) -> Any:
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    engines = [engine for engine in [*_engines.values()] if _keeps(engine, given)]
    if not engines:
        return original(given or parameters, *args, **kwargs)  # an empty generator is a warning of PyTorch's
    call = f"torch.nn.utils.{original.__name__.removeprefix('_')}"
    loops = [_loop_of(engine, call) for engine in engines]
    if original.__name__ == _BY_GIVEN_NORM:
        raise RuntimeError(
            f"{call}: the norm was taken of gradients that are empty, since ZeRO keeps them: use clip_grad_norm_."
        )
    if original.__name__ == _NORM and len(loops) == 1:
        return loops[0].of_parameters(call, given, *args, **kwargs)
    for engine in engines:
        given = without_local(engine, given)
    with ExitStack() as stack:
        for loop in loops:
            stack.enter_context(loop.whole_gradients(call))
        return original(given, *args, **kwargs)


def _keeps(engine: KeepsGradients, given: Sequence[torch.Tensor]) -> bool:
    if engine.shows_gradients or not engine.has_pending_gradients:
        return False
    return any(id(parameter) in engine.optimizer.layout.ids for parameter in given)


def _loop_of(engine: KeepsGradients, call: str) -> Clipping:
    if engine.loop_clipping is None:
        raise RuntimeError(
            f"{call} got parameters whose gradients a ZeRO engine keeps, so that param.grad is empty, and by what the "
            "window's sum is divided is known in engine.step() only: set gradient_clipping in the DeepSpeed config, "
            "which clips the divided gradient; engine.pending_norm(divisor) returns its norm."
        )
    return engine.loop_clipping
