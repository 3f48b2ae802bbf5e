"""Adapters for releases of DeepSpeed other than the newest, one a file, each with its reason and its tests.

An adapter is a subclass of the request-safe optimizer that does what DeepSpeed's older methods leave out. It is chosen
by what DeepSpeed has, and not by its number.
"""

from __future__ import annotations

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from requestzero.zero.stage_1_and_2.optimizer import RequestZeROOptimizer
from requestzero.zero.upstream.before_0_19_7 import OptimizerBefore0197
from requestzero.zero.upstream.before_0_19_8 import OptimizerBefore0198


def optimizer_class() -> type[RequestZeROOptimizer]:
    """Return the ZeRO-1/2 optimizer for the installed DeepSpeed."""
    if not hasattr(DeepSpeedZeroOptimizer, "_is_muon_group"):
        return OptimizerBefore0197
    if not hasattr(DeepSpeedZeroOptimizer, "_muon_update_lacks_loss_scale"):
        return OptimizerBefore0198
    return RequestZeROOptimizer
