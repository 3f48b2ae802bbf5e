"""The overflow policies as an optimizer of any ZeRO stage carries them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from requestzero.zero.common import life_cycle
from requestzero.zero.common.rollback import RequestRollback
from requestzero.zero.common.window import DroppedRequest
from requestzero.zero.overflow.loss_scale import reduce_scale
from requestzero.zero.overflow.origin import OverflowOrigin


class CheckedOptimizer(life_cycle.WindowedOptimizer, Protocol):
    """A windowed optimizer with the parts that the policies need."""

    origin: OverflowOrigin | None
    rollback: RequestRollback | None


def check_request(optimizer: CheckedOptimizer) -> DroppedRequest | None:
    """Undo the request that has just ended if the window's sum is not finite now. Collective, one host read."""
    assert optimizer.rollback is not None
    optimizer.sums.refresh_norms()
    squares, window = optimizer.norm.read_squares(optimizer.window), optimizer.window
    dropped = optimizer.rollback.check_request(window, squares, lambda: life_cycle.discard(optimizer))
    optimizer.window = window  # still the same window to who holds it
    return dropped


def adjust_scale(optimizer: CheckedOptimizer, has_overflow: bool, update: Callable[[bool], None]) -> None:
    """Adjust the loss scale after the check; find the origin of an overflow while the gradients are still there.

    Args:
        optimizer: the one that steps.
        has_overflow: the window's gradient is not finite; collective then, where its origin is recorded.
        update: DeepSpeed's adjustment.
    """
    if has_overflow and optimizer.origin is not None:
        optimizer.origin.find(optimizer.window)
    optimizer.loss_scale_exhausted = has_overflow and reduce_scale(lambda: update(True))
    if not has_overflow:
        update(False)
