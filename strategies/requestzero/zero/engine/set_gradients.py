"""``param.grad`` that a loop has set between backward and step, where the window's gradient is not."""

from __future__ import annotations

import warnings
from typing import Any

from deepspeed import comm as dist

from requestzero.zero.common.user_line import stacklevel_of_user


class SetGradients:
    """Leaves such gradients out, and says so once, on the first rank.

    They would be added to the sum, or be a part of the next window. Finding them reads one attribute of each parameter.
    """

    def __init__(self) -> None:
        self._told = False

    def leave_out(self, optimizer: Any) -> None:
        """Drop what was set. To be called where backwards that the engine has not seen are counted (this rank only)."""
        if optimizer.has_unseen_gradients or optimizer._backward_active_depth > 0:
            return  # what is on parameters has come from a backward
        found = [param for param in optimizer.layout.params if param.grad is not None]
        for param in found:
            param.grad = None
        if found and not self._told and dist.get_rank() == 0:
            self._told = True
            warnings.warn(
                f"p.grad of {len(found)} parameters was set between backward and step. It is left out, since ZeRO "
                "keeps the window's gradient elsewhere: change that in a block of plugin.gradients(accelerator) "
                "(Accelerate), RequestZeROFabric.gradients(model) (Fabric) or strategy.gradients() (Lightning), or "
                "with deepspeed.utils.safe_set_full_grad.",
                stacklevel=stacklevel_of_user(),
            )
