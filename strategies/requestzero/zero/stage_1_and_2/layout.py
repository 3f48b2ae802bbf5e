"""The partitions of ZeRO 1 and 2: the part of each parameter that every rank owns, and its place in the partition.

A parameter group is flattened, padded and cut into one partition of equal size for each rank of its process group, so
that a parameter may be split between ranks. Positions and sizes are in elements. A parameter's id is its position among
the parameters of all groups, in the order in which the optimizer was given them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from deepspeed import comm as dist

Parameter = torch.nn.Parameter


class Place(NamedTuple):
    """A stretch of a flattened parameter, and where it lies in flat memory."""

    start: int
    """Its first element within the parameter."""
    offset: int
    """Its first element within the memory."""
    numel: int


class Share(NamedTuple):
    """A stretch of a flattened parameter that one rank owns."""

    rank: int
    """Within the group's process group."""
    start: int
    numel: int


@dataclass(frozen=True)
class GroupLayout:
    """One parameter group."""

    index: int
    partition_size: int
    """Elements of a partition, padding included."""
    process_group: Any
    """The ranks that share the group: the data-parallel ranks, or those of an expert."""
    owned: Mapping[int, Place]
    """This rank's parts of parameters, by parameter id, in the order of its partition."""
    shares: Mapping[int, Sequence[Share]]
    """All ranks' parts of each parameter, by parameter id, in the parameter's order."""


class PartitionedParameters(Protocol):
    """DeepSpeed's description of its partitions."""

    bit16_groups: list[list[Parameter]]
    round_robin_bit16_groups: list[list[Parameter]]
    round_robin_bit16_offsets: list[list[int]]
    partition_size: list[int]
    real_dp_process_group: list[Any]


class PartitionLayout:
    """All parameter groups of an optimizer, as its constructor has laid them out."""

    def __init__(self, optimizer: PartitionedParameters) -> None:
        self.params: list[Parameter] = [param for group in optimizer.bit16_groups for param in group]
        """By id."""
        self.ids: dict[int, int] = {id(param): number for number, param in enumerate(self.params)}
        """``id(parameter)`` -> parameter id."""
        self.group_of: list[int] = [index for index, group in enumerate(optimizer.bit16_groups) for _ in group]
        """Index of the parameter's group, by parameter id."""
        self.groups = [self._lay_out(optimizer, index) for index in range(len(optimizer.bit16_groups))]
        self.evenly: list[Parameter] = [self.params[param_id] for param_id in _evenly(self.groups)]
        """In an order in which any stretch of neighbours belongs to all ranks in about equal parts."""

    def id_of(self, param: Parameter) -> int:
        """Return the id of a parameter that the optimizer updates."""
        return self.ids[id(param)]

    def frozen(self, group: int) -> list[tuple[int, int]]:
        """Return offset and size of what this rank owns of the frozen parameters of a group, within its partition."""
        owned = self.groups[group].owned
        return [(place.offset, place.numel) for each, place in owned.items() if not self.params[each].requires_grad]

    def _lay_out(self, optimizer: PartitionedParameters, index: int) -> GroupLayout:
        size = int(optimizer.partition_size[index])
        rank = dist.get_rank(group=optimizer.real_dp_process_group[index])
        owned: dict[int, Place] = {}
        shares: dict[int, list[Share]] = {}
        # In the order of the flat memory, which round_robin_gradients permutes.
        ordered = zip(
            optimizer.round_robin_bit16_groups[index], optimizer.round_robin_bit16_offsets[index], strict=True
        )
        for param, offset in ordered:
            if param.numel() == 0:
                continue
            param_id = self.id_of(param)
            shares[param_id] = _shares(int(offset), param.numel(), size)
            for share in shares[param_id]:
                if share.rank == rank:
                    owned[param_id] = Place(share.start, int(offset) + share.start - rank * size, share.numel)
        return GroupLayout(index, size, optimizer.real_dp_process_group[index], owned, shares)


def _evenly(groups: Sequence[GroupLayout]) -> list[int]:
    """Order the ids of parameters that have elements by how far they are from the beginning of a partition."""
    distance: dict[int, float] = {}
    for group in groups:
        ends = dict.fromkeys(range(dist.get_world_size(group=group.process_group)), 0)
        for param_id, shares in group.shares.items():
            rank = shares[0].rank
            distance[param_id] = ends[rank] / group.partition_size
            for share in shares:
                ends[share.rank] += share.numel
    return sorted(distance, key=distance.__getitem__)


def _shares(offset: int, numel: int, partition_size: int) -> list[Share]:
    """Cut the stretch from ``offset`` on, of ``numel`` elements, at the ends of partitions."""
    shares, start = [], 0
    while start < numel:
        rank = (offset + start) // partition_size
        count = min(numel - start, (rank + 1) * partition_size - offset - start)
        shares.append(Share(rank, start, count))
        start += count
    return shares
