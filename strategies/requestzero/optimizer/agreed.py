"""Reductions that the ranks have agreed on, and, as an option, over all parameters whichever a rank has used."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero import stage_1_and_2
from typing_extensions import override

from requestzero.agreement.agreement import RankAgreement
from requestzero.agreement.communication import WatchedCommunication
from requestzero.optimizer.swap import replaced
from requestzero.optimizer.windowed import WindowedOptimizer


class AgreedReduction(WindowedOptimizer):
    """Written for DeepSpeed 0.19.8, which reduces what hooks bring and hangs or aborts where ranks bring other things.

    Args:
        rank_dependent_parameters: reduce everything at the end of a backward (stage 2) or request (stage 1), in one
            order, with zeros for gradients that this rank does not have.
    """

    def take_agreement(self, agreement: RankAgreement) -> None:
        """Ask ``agreement`` before reductions from now on."""
        self.agreement = agreement
        self.comm = WatchedCommunication(agreement)

    @override
    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        """Also agree on what is reduced, where that is not known, and wait so that the wait can end.

        Nothing where nothing waits, as after a backward without any parameter: DeepSpeed looks for its bucket then.
        """
        dtypes = self.ipg_buckets if comm_dtype is None else (comm_dtype,)
        flush = tuple(param_id for dtype in dtypes for _, _, param_id in self.ipg_buckets[dtype].params)
        if not flush:
            return
        if self.comm is dist:
            super().reduce_ipg_grads(comm_dtype)
            return
        # Where a bucket is emptied within a backward, this is the parameter for which it has no room.
        self.agreement.before_reduction(flush, None if comm_dtype is None else self.arriving)
        with replaced(stage_1_and_2, "dist", self.comm):
            super().reduce_ipg_grads(comm_dtype)

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """Also reduce what waits for a fixed order, and close the reduction: all paths of both stages end here."""
        if self.rank_dependent_parameters:
            self._reduce_everything()
        super().independent_gradient_partition_epilogue()
        self.agreement.end_reduction()

    @override
    def reduce_ready_partitions_and_remove_grads(self, param: torch.nn.Parameter, i: int) -> None:
        """Not yet, where it waits for a fixed order."""
        self.arriving = self.get_param_id(param)
        if not self.rank_dependent_parameters:
            super().reduce_ready_partitions_and_remove_grads(param, i)

    def _reduce_everything(self) -> None:
        self.setup_buckets()
        for group_idx, group in enumerate(self.bit16_groups):
            for param in group:
                if self.get_gradient_for_reduction(param) is None:
                    self._set_zero_gradient(param)
                self.arriving = self.get_param_id(param)
                super().reduce_ready_partitions_and_remove_grads(param, group_idx)

    def _set_zero_gradient(self, param: Any) -> None:
        if self.use_grad_accum_attribute:
            param.grad_accum = torch.zeros_like(param, dtype=self.gradient_accumulation_dtype)
        else:
            param.grad = torch.zeros_like(param)
