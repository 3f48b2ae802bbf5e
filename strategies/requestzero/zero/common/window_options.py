"""The options of an engine that its optimizer carries out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from requestzero.config.reduction_time import ReduceAt, ReductionTime


@dataclass(frozen=True)
class WindowOptions:
    """Options of every ZeRO stage, unless it is said otherwise."""

    retain: bool | str = False
    """``retain_gpu_grad_partition_until_step`` (stages 1 and 2)."""
    records_origin: bool = False
    """``on_overflow="raise"``."""
    drops_requests: bool = False
    """``on_overflow="drop_request"``."""
    aborts: bool = False
    """``abort``."""
    reduction: ReductionTime = field(default_factory=lambda: ReductionTime(ReduceAt.BACKWARD))
    """``reduce_gradients_at`` (stages 1 and 2)."""
    reduces_sums_in: torch.dtype | None = None
    """Dtype in which sums of several micro-batches are reduced; ``None``: the communication dtype (likewise)."""
    fills_absent: bool = False
    """``rank_dependent_parameters`` (stages 1 and 2)."""
    compares_weights: bool = True
    """``compare_weights`` (stages 1 and 2)."""
