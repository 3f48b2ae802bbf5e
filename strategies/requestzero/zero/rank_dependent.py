"""``rank_dependent_parameters``: gradients of all parameters in one order, whichever of them a rank has used."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from typing_extensions import override

from requestzero.zero.zero_optimizer import RequestZeROOptimizer


class RankDependentOptimizer(RequestZeROOptimizer):
    """Reduces everything at the end of a backward (stage 2) or request (stage 1), with zeros for absent gradients.

    Written for DeepSpeed 0.19.8, which reduces what hooks bring, in their order.
    """

    @cached_property
    @override
    def _packs_buckets(self) -> bool:
        """No: zeros for absent gradients come in later."""
        return False

    @override
    def reduce_ready_partitions_and_remove_grads(self, param: torch.nn.Parameter, i: int) -> None:
        """Not yet: a gradient waits for the end."""

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """Also reduce what has waited: all paths of both stages end here."""
        self.setup_buckets()
        for group_idx, group in enumerate(self.bit16_groups):
            for param in group:
                if self.get_gradient_for_reduction(param) is None:
                    self._set_zero_gradient(param)
                super().reduce_ready_partitions_and_remove_grads(param, group_idx)
        super().independent_gradient_partition_epilogue()

    def _set_zero_gradient(self, param: Any) -> None:
        if self.use_grad_accum_attribute:
            param.grad_accum = torch.zeros_like(param, dtype=self.gradient_accumulation_dtype)
        else:
            param.grad = torch.zeros_like(param)
