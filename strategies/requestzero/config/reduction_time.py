"""The time of the gradients' reduction over ranks, as the option ``reduce_gradients_at`` and others decide it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ReduceAt(Enum):
    """When gradients are reduced."""

    BACKWARD = "backward"
    REQUEST = "request"
    WINDOW = "window"
    NEXT_REQUEST = "next request"
    """When the next request begins, or before the step: until then a request can be undone by dropping them."""


@dataclass(frozen=True)
class ReductionTime:
    """What the options mean for one engine."""

    at: ReduceAt
    while_memory: bool = False
    """Only while the ranks have memory for the model's gradients, else in every backward."""


def reduction_time(
    stage: int, wanted: str | None, on_overflow: str, unequal: bool = False, abort: bool = False
) -> ReductionTime:
    """Return the time of the reduction.

    Args:
        stage: of ZeRO.
        wanted: the option ``reduce_gradients_at``.
        on_overflow: the option of that name; ``"raise"`` and ``"drop_request"`` look at the sum of every request.
        unequal: the option ``rank_dependent_micro_batches``.
        abort: the option of that name.

    Raises:
        ValueError: the options disagree.
    """
    if unequal and abort:
        raise ValueError(
            "requestzero.abort=true and requestzero.rank_dependent_micro_batches=true disagree: a request is aborted "
            "by all ranks together, which have none in common where their micro-batches differ. Leave one of them out."
        )
    if stage == 3:
        if wanted is not None or unequal:
            raise ValueError(
                "requestzero.reduce_gradients_at and requestzero.rank_dependent_micro_batches do not apply to "
                "zero_optimization.stage=3, which gathers weights and reduces gradients in every backward: leave them "
                "out, or use stage 1 or 2."
            )
        return ReductionTime(ReduceAt.BACKWARD)
    looks_at_requests = on_overflow in ("raise", "drop_request")
    if wanted == "backward" and stage == 1:
        raise ValueError(
            "requestzero.reduce_gradients_at='backward' and zero_optimization.stage=1 disagree: stage 1 keeps the "
            "gradients of the whole model on every rank until a request ends. Use 'request' or 'window', or stage 2."
        )
    if wanted == "window" and looks_at_requests:
        raise ValueError(
            f"requestzero.reduce_gradients_at='window' and overflow.on_overflow={on_overflow!r} disagree: the policy "
            "looks at the sum over ranks at every request's end. Use 'request', or leave one of them out."
        )
    if unequal and (looks_at_requests or wanted not in ("window", *((None, "auto") if stage == 1 else ()))):
        raise ValueError(
            "requestzero.rank_dependent_micro_batches=true needs gradients that wait for the window's end: set "
            "requestzero.reduce_gradients_at='window' (stage 1 does it by default), and overflow.on_overflow to 'skip'."
        )
    if wanted == "backward" or (wanted is None and stage == 2):
        return ReductionTime(ReduceAt.BACKWARD)
    if looks_at_requests:
        latest = ReduceAt.REQUEST
    elif abort:
        latest = ReduceAt.NEXT_REQUEST
    else:
        latest = ReduceAt.REQUEST if wanted == "request" else ReduceAt.WINDOW
    return ReductionTime(latest, while_memory=wanted == "auto" and stage == 2)
