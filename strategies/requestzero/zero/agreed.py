"""Reductions that the ranks have agreed on."""

from __future__ import annotations

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero import stage_1_and_2
from typing_extensions import override

from requestzero.rank_check.communication import WatchedCommunication
from requestzero.rank_check.rank_agreement import RankAgreement
from requestzero.zero.patch import replaced
from requestzero.zero.windowed import WindowedOptimizer


class AgreedReduction(WindowedOptimizer):
    """Written for DeepSpeed 0.19.8, which hangs or aborts where the hooks of ranks bring different gradients."""

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
        # Where a bucket is emptied within a backward, there is a parameter for which it has no room.
        within = comm_dtype is not None and self.arriving is not None
        self.agreement.before_reduction(flush, self.get_param_id(self.arriving) if within else None)
        with replaced(stage_1_and_2, "dist", self.comm):
            super().reduce_ipg_grads(comm_dtype)

    @override
    def independent_gradient_partition_epilogue(self) -> None:
        """Also close the reduction: all paths of both stages end here."""
        super().independent_gradient_partition_epilogue()
        self.agreement.end_reduction()
