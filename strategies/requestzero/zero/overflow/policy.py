"""The overflow policies as an optimizer of any ZeRO stage carries them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from typing_extensions import override

from requestzero.zero.common import life_cycle
from requestzero.zero.common.norm import cause_of_overflow
from requestzero.zero.common.window import DroppedRequest
from requestzero.zero.overflow.loss_scale import reduce_scale
from requestzero.zero.overflow.origin import OverflowOrigin


class CheckedOptimizer(life_cycle.WindowedOptimizer, Protocol):
    """A windowed optimizer with the parts that the policies need."""

    @property
    @override
    def origin(self) -> OverflowOrigin | None: ...


def check_request(optimizer: CheckedOptimizer) -> DroppedRequest | None:
    """Undo the request that has just ended if the window's sum is not finite now. Collective, one host read."""
    optimizer.sums.refresh_norms()
    window, rollback = optimizer.window, optimizer.rollback
    cause = cause_of_overflow(optimizer.norm.read_squares(window))
    if cause is None:
        return None
    micro_batches = window.micro_batches - rollback.before().micro_batches
    dropped = DroppedRequest(rollback.name(window), micro_batches, cause)
    life_cycle.undo_request(optimizer)
    window.dropped.append(dropped)
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
