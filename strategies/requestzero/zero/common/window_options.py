"""The options of an engine that its optimizer carries out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WindowOptions:
    """Options of every ZeRO stage, unless it is said otherwise."""

    retain: bool | str = False
    """``retain_gpu_grad_partition_until_step`` (stages 1 and 2)."""
    records_origin: bool = False
    """``on_overflow="raise"``."""
    drops_requests: bool = False
    """``on_overflow="drop_request"``."""
    fills_absent: bool = False
    """``rank_dependent_parameters`` (stages 1 and 2)."""
    compares_weights: bool = True
    """``compare_weights`` (stages 1 and 2)."""
