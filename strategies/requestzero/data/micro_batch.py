"""A micro-batch with the marks that say where its request and its update window end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from requestzero.config.validation import check_weight

RequestId = str | int | None
"""Name of a request; ``None`` where it has none."""


@dataclass
class MicroBatch:
    """One forward and backward of one request on one data-parallel rank.

    The training loop unwraps it: the model, its hooks and callbacks see ``inputs`` only. Every data-parallel
    rank must yield the same sequence of ``request_end`` and ``window_end`` values.

    Raises:
        ValueError: ``window_end`` without ``request_end``, or a weight that is no finite number of at least 0.
    """

    inputs: Any
    """The batch that the model's training step receives."""
    request_end: bool = True
    """True for the last micro-batch of its request, whose gradients are complete after it."""
    window_end: bool | None = None
    """True where the optimizer steps after this micro-batch. ``None``: the training loop counts requests instead
    (``accumulate_grad_batches`` of them make a window). A loader sets it on all micro-batches or on none."""
    weight: Any = None
    """Weight of this micro-batch in the window's mean, such as its number of trainable tokens: a finite number of at
    least 0, or a tensor that holds one. Needed with ``normalization="token"``, where the loss is a sum over what it
    counts; ``"mean"`` and ``"sum"`` do not use it."""
    request_id: RequestId = None
    """Name of the request in messages and logs."""
    micro_batches: int | None = None
    """Announced number of micro-batches of the request on every rank, fillers included. ``None``: not announced."""

    def __post_init__(self) -> None:
        if self.weight is not None:
            check_weight(self.weight)
        if self.window_end and not self.request_end:
            raise ValueError(
                f"MicroBatch of request {self.request_id!r} has window_end=True and request_end=False: "
                "the optimizer can only step at the end of a request. Set request_end=True."
            )
