"""Memory for the gradients of the whole model, which every rank keeps until they are reduced."""

from __future__ import annotations

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from requestzero.zero.common.ranks import Ranks
from requestzero.zero.stage_1_and_2.accumulators.retention import MemoryWatch
from requestzero.zero.stage_1_and_2.local_gradients import LocalGradients


class LocalMemory:
    """Decides for all ranks whether they keep their gradients.

    Args:
        size: bytes of the model's gradients in the dtype of the accumulation.
        local: what is kept already.
        ranks: the data-parallel ranks.
    """

    def __init__(self, size: int, local: LocalGradients, ranks: Ranks) -> None:
        self._size, self._local, self._ranks = size, local, ranks
        self._watch = MemoryWatch(0, "its gradients until the window's end", ("keeps", "does not keep"))

    def suffices(self) -> bool:
        """Return whether every rank has memory. Collective, one host read."""
        suffices = self._watch.suffices(max(0, self._size - self._local.nbytes))
        if self._ranks.size == 1:
            return suffices
        vote = torch.tensor(float(suffices), device=get_accelerator().current_device_name())
        self._ranks.comm.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._ranks.group)
        return self._ranks.read(vote.view(1)) == [1.0]
