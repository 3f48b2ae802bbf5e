"""The shards of ZeRO 3: the part of every parameter that a rank owns, and its place in the flat gradient buffer.

A parameter is flattened and cut into one shard of equal size for each rank; the last ones may end in padding, or hold
nothing else. A rank's shards lie one after another in one buffer, sub-group by sub-group. Sub-groups are cut by
``sub_group_size`` and are stepped one after another: several of them may belong to one parameter group. Positions and
sizes are in elements. A parameter's id is its position among the parameters of all sub-groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed
from deepspeed import comm as dist


class Shard(NamedTuple):
    """A stretch of the buffer that holds what this rank owns of a parameter."""

    offset: int
    numel: int
    """Padding included."""
    owned: int
    """Elements of the parameter among them; 0 where the shard is padding."""
    start: int
    """The first of them within the parameter."""


class Stretch(NamedTuple):
    """A sub-group's part of the buffer."""

    offset: int
    numel: int


class ShardedParameters(Protocol):
    """DeepSpeed's description of its sub-groups."""

    fp16_groups: list[list[Any]]
    sub_group_process_groups: list[Any]


class ShardLayout:
    """All sub-groups of an optimizer, as its constructor has laid them out."""

    def __init__(self, optimizer: ShardedParameters) -> None:
        self.params: list[Any] = [param for group in optimizer.fp16_groups for param in group]
        """By id."""
        self.ids: dict[int, int] = {id(param): number for number, param in enumerate(self.params)}
        """``id(parameter)`` -> parameter id."""
        self.groups: list[list[int]] = []
        """Parameter ids, by sub-group."""
        self.sub_groups: list[int] = []
        """By parameter id."""
        self.shards: list[Shard] = []
        """By parameter id."""
        self.stretches: list[Stretch] = []
        """By sub-group."""
        for params, process_group in zip(optimizer.fp16_groups, optimizer.sub_group_process_groups, strict=True):
            self._lay_out(params, dist.get_rank(group=process_group))

    def id_of(self, param: Any) -> int:
        """Return the id of a parameter that the optimizer updates."""
        return self.ids[id(param)]

    def frozen(self, sub_group: int) -> list[tuple[int, int]]:
        """Return offset and size of the shards of frozen parameters within a sub-group's stretch, padding included."""
        start = self.stretches[sub_group].offset
        frozen = [self.shards[number] for number in self.groups[sub_group] if not self.params[number].requires_grad]
        return [(shard.offset - start, shard.numel) for shard in frozen]

    def _lay_out(self, params: Sequence[Any], rank: int) -> None:
        start = end = sum(self.stretches[-1]) if self.stretches else 0
        self.groups.append(list(range(len(self.shards), len(self.shards) + len(params))))
        self.sub_groups.extend(len(self.stretches) for _ in params)
        for param in params:
            numel = int(param.partition_numel())
            owned = max(0, min(numel, int(param.ds_numel) - rank * numel))
            self.shards.append(Shard(end, numel, owned, rank * numel))
            end += numel
        self.stretches.append(Stretch(start, end - start))


def check_one_group(groups: Sequence[Any], data_parallel: Any) -> None:
    """Raise ValueError unless all parameters are cut over the data-parallel ranks.

    Args:
        groups: process group of every sub-group. Not compared as objects: DeepSpeed has several of the same ranks.
        data_parallel: process group of the optimizer.
    """
    ranks_of = torch.distributed.get_process_group_ranks
    wanted, others = ranks_of(data_parallel), [ranks_of(group) for group in groups]
    for ranks in others:
        if ranks != wanted:
            raise ValueError(
                f"A parameter is cut over the ranks {ranks}, and the data-parallel ranks are {wanted}: requestzero's "
                "stage 3 sums over one group of ranks, which leaves out MiCS, experts of their own group (AutoEP) and "
                "deepspeed.zero.Init over more ranks than are data-parallel. Remove it, or call deepspeed.initialize."
            )
