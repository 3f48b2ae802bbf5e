"""DeepSpeed 0.19.6 and 0.19.7: a step that looks at the norm too late, and Muon without a loss scale.

- ``step`` finds an overflow only where the check is on. Since 0.19.8 it also skips a window whose norm is not finite
  where the norm is read for another reason (clipping, unused parameters), except in bf16, and reports an infinite norm.
- ``step`` keeps ``overflow`` of an earlier step where nothing is checked.
- Muon: the update is divided by the loss scale, although it does not carry it, and the momentum of all but the last
  matrix of a partition is lost (0.19.7), or moves with a skipped window (0.19.6). Both are inside what would have to be
  written anew here, so Muon is refused.

Goes when DeepSpeed 0.19.7 is no longer supported. Tested with 0.19.6 and 0.19.7.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from typing_extensions import override

from requestzero.zero.stage_1_and_2.optimizer import RequestZeROOptimizer


class OptimizerBefore0198(RequestZeROOptimizer):
    """The request-safe optimizer on the step of DeepSpeed 0.19.6 and 0.19.7."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._muon_groups():
            raise ValueError(
                "Muon is not allowed with this version of DeepSpeed, which loses its momentum and divides its updates "
                'by the loss scale. Run: pip install "deepspeed>=0.19.8", or give another optimizer.'
            )

    @override
    def apply_sums(self, closure: Any) -> None:
        """Check also where only clipping or unused parameters need the norm; report the norm of a skipped window."""
        check, self.overflow = self.check_grad_overflow, False
        reads_norm = self.compute_grad_norm and (self.clip_grad > 0.0 or self.norm.refuses_unused)
        self.check_grad_overflow = check or (reads_norm and self.dtype != torch.bfloat16)
        try:
            super().apply_sums(closure)
        finally:
            self.check_grad_overflow = check
        if self.overflow and self.compute_grad_norm:
            self._global_grad_norm = math.inf
