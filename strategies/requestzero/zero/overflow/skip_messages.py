"""Messages about updates that are not applied: log lines, and errors that end the run on all ranks."""

from __future__ import annotations

import logging

from deepspeed import comm as dist

from requestzero.errors import GradientOverflowError
from requestzero.zero.common.window import DroppedRequest
from requestzero.zero.overflow.skips import SkippedUpdate, SkipRecord

logger = logging.getLogger("requestzero")


def log_skip(skip: SkippedUpdate, record: SkipRecord, skipped: int) -> None:
    """Log a skipped update as a warning, on rank 0.

    Args:
        skip: the update that was skipped just now.
        record: with that update in it.
        skipped: updates that were skipped so far, this one included.
    """
    if dist.get_rank() == 0:
        logger.warning(
            "Skipped %s: its gradient is not finite, nothing was applied. %d skipped in a row, %d of %d in all.",
            skip.describe(),
            record.consecutive,
            skipped,
            skip.update,
        )


def log_dropped(dropped: DroppedRequest, update: int) -> None:
    """Log as a warning, on rank 0, that a request is not part of the update with this number."""
    if dist.get_rank() == 0:
        logger.warning(
            "Left request %r (%d micro-batches) out of update %d: with it the gradient is not finite (%s).",
            dropped.request_id,
            dropped.micro_batches,
            update,
            dropped.cause,
        )


def raise_on_all_ranks(message: str) -> None:
    """Raise GradientOverflowError with rank 0's message on every rank (collective)."""
    messages = [message]
    dist.broadcast_object_list(messages, src=0)
    raise GradientOverflowError(messages[0])


def describe_overflow(skip: SkippedUpdate, origin: str) -> str:
    """Return the message of ``on_overflow="raise"``."""
    return (
        f"The gradient is not finite in {skip.describe()}, and overflow.on_overflow is 'raise'. {origin} Nothing was "
        "applied: weights and optimizer state are those before this window."
    )


def describe_skips_in_a_row(record: SkipRecord, allowed: int) -> str:
    """Return the message of ``max_consecutive_skips``."""
    skips = list(record.recent)[-record.consecutive :]
    earlier = f" (the last {len(skips)})" if len(skips) < record.consecutive else ""
    return (
        f"{record.consecutive} updates in a row were skipped for gradients that are not finite, and "
        f"overflow.max_consecutive_skips is {allowed}. Skipped{earlier}: "
        f"{'; '.join(skip.describe() for skip in skips)}. {describe_scales(record)} Look at these requests and at the "
        "learning rate, or allow more."
    )


def describe_scale_at_minimum(record: SkipRecord) -> str:
    """Return the message for a dynamic loss scale that would have to fall below its minimum."""
    return (
        f"The dynamic loss scale cannot fall any further: {record.recent[-1].describe()} is not finite with "
        f"fp16.min_loss_scale. {describe_scales(record)} The gradient itself is not finite, or min_loss_scale is too "
        "high."
    )


def describe_scales(record: SkipRecord, most: int = 10) -> str:
    """Return the last changes of the loss scale, in words."""
    scales = list(record.loss_scales)[-most:]
    changes = ", ".join(f"{scale:g} from update {attempted + 1} on" for attempted, scale in scales)
    return f"Loss scale: {changes}."
