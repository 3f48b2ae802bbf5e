"""The description of a small training run under Lightning, in picklable terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Run:
    """A small training run."""

    strategy: str = "requestzero"
    """``"requestzero"``, ``"ddp"`` or ``"stock"`` (DeepSpeed's own, made to start on the CPU)."""
    options: dict[str, Any] = field(default_factory=dict)
    """For the strategy."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """For the Trainer; ``accumulate`` is short for ``accumulate_grad_batches``."""
    batches: int = 12
    marks: list[tuple[bool, bool | None]] | None = None
    """``(request_end, window_end)`` of each batch of an epoch; ``None``: plain batches."""
    manual: str | None = None
    """Manual optimization: a name of one of the ``manual_...`` methods of the model."""
    schedule: bool = True
    validate: bool = False
    weighted: bool = False
    """Whether the loader gives each micro-batch the weight ``batch_weight``."""
    adds_weight: int = 0
    """How often ``training_step`` reports the weight itself."""
    empty_batches: tuple[int, ...] = ()
    """Batch indices whose weight is zero on both ranks."""
    nan_batches: tuple[int, ...] = ()
    """Batch indices (over all epochs) at which rank 0 gets a NaN."""
    aborted_batches: tuple[int, ...] = ()
    """Batch indices (over all epochs) at which ``training_step`` aborts its request."""
    aborts_by: str = "raise"
    """``"raise"`` and ``"return"`` before the backward; ``"late"``: raise after it (manual optimization)."""
    aborting_rank: int | None = None
    """The only rank that does so; ``None``: all of them."""
    callbacks: list[Any] = field(default_factory=list)
    """Classes of callbacks, or callbacks."""
    stateful: bool = False
    ckpt_path: str | None = None
    root: str | None = None
    optimizer: str = "sgd"
    model: str = "linear"
    dropout: float = 0.0
    requests_at_step: list[int] = field(default_factory=list)
    """Filled by ``manual_two_requests``: ended requests of the window when the step comes."""
