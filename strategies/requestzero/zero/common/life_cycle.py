"""The end of an update window: applied, skipped or discarded, after which nothing of it is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from requestzero.zero.common.divisor import StepDivisor
from requestzero.zero.common.rollback import RequestRollback
from requestzero.zero.common.scale import StepScale
from requestzero.zero.common.step_norm import StepNorm
from requestzero.zero.common.window import UpdateWindow


class WindowSums(Protocol):
    """The sums of a window."""

    def complete(self) -> None: ...

    def refresh_norms(self) -> None: ...


class WindowRecord(Protocol):
    """Something else that is kept over one window."""

    def discard(self) -> None: ...


class RequestRecord(Protocol):
    """Something else that is kept for every request of a window."""

    def go_back(self, requests: int) -> None: ...


class WindowedOptimizer(Protocol):
    """An optimizer of any ZeRO stage that owns a window and these parts."""

    window: UpdateWindow
    scale: StepScale
    divisor: StepDivisor
    norm: StepNorm
    rollback: RequestRollback
    overflow: bool
    loss_scale_exhausted: bool
    _global_grad_norm: Any
    _backward_active_depth: int

    @property
    def sums(self) -> WindowSums: ...

    @property
    def origin(self) -> RequestRecord | None: ...

    @property
    def loss_scale(self) -> Any: ...

    @property
    def window_records(self) -> Sequence[WindowRecord]: ...

    @property
    def norm_is_final(self) -> bool:
        """True if the norm of the sums is wanted, and is the norm of what the step applies."""
        ...

    def scaled_global_norm(self, norm_type: int = 2) -> float | torch.Tensor: ...

    def discard_gradients(self) -> None: ...

    def clear_backward_seen_flag(self) -> None: ...


def needs_step(optimizer: WindowedOptimizer) -> bool:
    """Return whether the window has gradients to apply. A window whose requests were all dropped is skipped here.

    Decided by what every rank has done alike, not by what a rank owns, which may be nothing but padding.

    Raises:
        RuntimeError: a request is still open (the engine's ``step`` ends it first).
    """
    window = optimizer.window
    if window.request_open:
        raise RuntimeError(
            f"optimizer.step() with an open request ({window.micro_batches} micro-batches in this window): "
            "call engine.step(), which ends it, or engine.end_request() before."
        )
    if window.is_open and not window.has_sum:
        _skip(optimizer)
    return window.has_sum


def _skip(optimizer: WindowedOptimizer) -> None:
    """End a window without requests like one that is not finite as a whole."""
    optimizer.overflow, optimizer.loss_scale_exhausted = True, False
    optimizer.norm.cause = optimizer.window.dropped[-1].cause
    optimizer._global_grad_norm = torch.tensor(float("inf"))
    discard(optimizer)


@contextmanager
def applying(optimizer: WindowedOptimizer) -> Iterator[None]:
    """Around DeepSpeed's step: the scale is fixed, the sums are complete; afterwards the window is gone."""
    divisor = optimizer.divisor
    if not divisor.by_weight:
        optimizer.norm.forget()  # what a step by weight that was given up has read
    optimizer.norm.unread = None
    with optimizer.scale.fixed(float(optimizer.loss_scale) * divisor.value):
        optimizer.sums.complete()
        yield
        if optimizer.norm.unread is not None:
            optimizer._global_grad_norm = optimizer.norm.unread / float(optimizer.loss_scale)
    if isinstance(optimizer._global_grad_norm, float):
        optimizer._global_grad_norm = torch.tensor(optimizer._global_grad_norm)  # a tensor, as DeepSpeed gives
    discard(optimizer)


def discard(optimizer: WindowedOptimizer) -> None:
    """Forget every gradient since the last step, reduced or not, and begin a new window (this rank only)."""
    optimizer.discard_gradients()
    forget_backward(optimizer)
    optimizer.norm.forget()
    optimizer.divisor.reset()
    for record in optimizer.window_records:
        record.discard()
    optimizer.window = optimizer.window.successor()


def forget_backward(optimizer: WindowedOptimizer) -> None:
    """Forget a backward that has not ended, for whose rest DeepSpeed would take the next gradients (this rank only)."""
    optimizer._backward_active_depth = 0
    optimizer.clear_backward_seen_flag()


def undo_request(optimizer: WindowedOptimizer) -> None:
    """Make the window what it was before the request at hand (this rank only)."""
    window = optimizer.window
    optimizer.rollback.undo(window, lambda: discard(optimizer))
    optimizer.window = window  # still the same window to who holds it
    optimizer.norm.forget()
    if optimizer.origin is not None:
        optimizer.origin.go_back(window.requests)


def resolve_token_divisor(optimizer: WindowedOptimizer) -> bool:
    """Make the window's total weight the divisor; return whether there is any. Collective, one host read.

    The norms that the step needs anyway are read along where they are final before it.

    Raises:
        AssertionError, RuntimeError: on all ranks, see ``StepNorm.read``.
    """
    divisor, norm = optimizer.divisor, optimizer.norm
    optimizer.sums.refresh_norms()
    divisor.by_weight = True
    norm.forget()
    if optimizer.norm_is_final:
        norm.read(optimizer.window)
    else:
        norm.read_divisor(optimizer.window)
    assert divisor.total_weight is not None
    return divisor.total_weight > 0


def pending_norm(optimizer: WindowedOptimizer) -> torch.Tensor:
    """Return the norm of the open window's sum divided by the divisor that was chosen, a scalar. Collective."""
    optimizer.sums.refresh_norms()
    scale = float(optimizer.loss_scale) * optimizer.divisor.value
    return torch.as_tensor(optimizer.scaled_global_norm() / scale)
