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

_GATHER_ALL = "all_gather_dp_groups"


class WeightGathers:
    """Gathers the weights of one parameter group beside the optimizer's step of the others.

    # HACK: DeepSpeed 0.19.8 steps group after group and then gathers all of them, by a function that it looks up by a
    # module-level name. While its step runs, that name ends the gathers which have begun here. Where there is nothing
    # to gather beside a step, DeepSpeed's function stays in its place.

    Args:
        groups: the layouts of all parameter groups, in the order of their steps.
        flat: gives the flat weights of all groups, as DeepSpeed's step gathers them.
        ranks: the data-parallel ranks.
    """

    def __init__(self, groups: Sequence[GroupLayout], flat: Callable[[], list[torch.Tensor]], ranks: Ranks) -> None:
        self._groups = [each for each in groups if dist.get_world_size(group=each.process_group) > 1]
        self._flat, self._ranks = flat, ranks
        self._steps = False  # a step runs
        self._works: list[Any] = []  # of the first groups, in their order

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Let DeepSpeed's step in the block end what :meth:`begin` has begun, and gather the other groups.

        A step that raises waits too: no weight may change after it.
        """
        if len(self._groups) < 2:
            yield
            return
        self._steps = True
        try:
            with self._all_gather_replaced():
                yield
        finally:
            self._steps = False
            self._wait()

    @contextmanager
    def _all_gather_replaced(self) -> Iterator[None]:
        original = getattr(stage_1_and_2, _GATHER_ALL)

        def gather(groups_flat: list[torch.Tensor], **rest: Any) -> None:
            if groups_flat is not self._flat():  # another engine's, in another thread
                return original(groups_flat=groups_flat, **rest)
            self.begin(len(self._flat()))
            return self._wait()

        with patched(stage_1_and_2, _GATHER_ALL, gather):
            yield

    def begin(self, count: int) -> None:
        """Begin to gather the first ``count`` groups, whose weights are final. Collective for those not begun yet."""
        if self._steps:
            ready = [each for each in self._groups if each.index < count]
            self._works.extend(map(self._gather, ready[len(self._works) :]))

    def _gather(self, group: GroupLayout) -> Any:
        flat, rank = self._flat()[group.index], dist.get_rank(group=group.process_group)
        own = flat.narrow(0, rank * group.partition_size, group.partition_size)
        return self._ranks.comm.all_gather_into_tensor(flat, own, group=group.process_group, async_op=True)

    def _wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()
