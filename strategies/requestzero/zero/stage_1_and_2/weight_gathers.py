"""The all-gather of updated weights, which begins for a parameter group when the next one steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero import stage_1_and_2

from requestzero.zero.common.ranks import Ranks
from requestzero.zero.patch import patched
from requestzero.zero.stage_1_and_2.layout import GroupLayout


class WeightGathers:
    """Gathers the weights of one parameter group beside the optimizer's step of the others.

    # HACK: DeepSpeed 0.19.8 steps group after group and then gathers all of them, by a function that it looks up by a
    # module-level name. While its step runs, that name ends the gathers which have begun here.

    Args:
        groups: the layouts of all parameter groups, in the order of their steps.
        flat: gives a group's flat weights by its index.
        ranks: the data-parallel ranks.
    """

    def __init__(self, groups: Sequence[GroupLayout], flat: Callable[[int], torch.Tensor], ranks: Ranks) -> None:
        self._groups, self._flat, self._ranks = groups, flat, ranks
        self._begun = 0
        self._works: list[Any] = []

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Let DeepSpeed's step in the block end what :meth:`begin` has begun, and gather the other groups."""
        self._begun, self._works = 0, []
        with patched(stage_1_and_2, "all_gather_dp_groups", self._finish):
            yield

    def begin(self, count: int) -> None:
        """Begin to gather the first ``count`` groups, whose weights are final. Collective for those not begun yet."""
        for group in self._groups[self._begun : count]:
            if dist.get_world_size(group=group.process_group) > 1:
                self._works.append(self._gather(group))
        self._begun = max(self._begun, count)

    def _gather(self, group: GroupLayout) -> Any:
        flat, rank = self._flat(group.index), dist.get_rank(group=group.process_group)
        own = flat.narrow(0, rank * group.partition_size, group.partition_size)
        return self._ranks.comm.all_gather_into_tensor(flat, own, group=group.process_group, async_op=True)

    def _finish(self, **_: Any) -> None:
        self.begin(len(self._groups))
        for work in self._works:
            work.wait()
        self._works.clear()
