"""Weights that a user has written since the last step, at stage 3: the master weights take them over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from requestzero.zero.common.written_elements import adopt_elements
from requestzero.zero.stage_3.layout import ShardLayout


class FlatShards(Protocol):
    """DeepSpeed's flat memory, by sub-group."""

    fp16_partitioned_groups_flat: list[torch.Tensor]
    fp32_partitioned_groups_flat: list[torch.Tensor]


class WrittenShards:
    """Brings what was written into this rank's shards into the master weights, before a step would undo it.

    A weight is written where it is whole, in ``GatheredParameters(..., modifier_rank=...)``, whose end brings it into
    the shards, or where DeepSpeed leaves a small parameter gathered. The step leaves shards that are the masters,
    rounded; an element that is something else by the next step was written since. Nothing counts such writes, so that
    only the comparison finds them. Nothing here is collective.

    Args:
        optimizer: has laid out the flat memory.
        layout: of its parameters.
        compares: false: look for nothing.
    """

    def __init__(self, optimizer: FlatShards, layout: ShardLayout, compares: bool) -> None:
        self._optimizer, self._layout, self._compares = optimizer, layout, compares
        self._set_masters: set[int] = set()  # ids of parameters whose weight follows with the next step

    def note_master(self, param: Any) -> None:
        """Note that the user has set the master of a parameter; it is right, not the weight."""
        self._set_masters.add(self._layout.id_of(param))

    def forget_set_masters(self) -> None:
        """Note that the weights are the masters, rounded. A skipped step, or saving, leaves those that were set."""
        self._set_masters.clear()

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over what was written since the last step (this rank only; offload copies weights to the host)."""
        if not self._compares:
            return
        self._bring_back()
        for index, weights in enumerate(self._optimizer.fp16_partitioned_groups_flat):
            masters = self._optimizer.fp32_partitioned_groups_flat[index]
            if weights.data_ptr() != masters.data_ptr():  # in fp32 they are the same
                for start, stop in self._stretches(index):
                    adopt_elements(weights, masters.detach(), start, stop)

    def _bring_back(self) -> None:
        """Copy this rank's part of parameters that stay gathered into their shards."""
        for number, (param, shard) in enumerate(zip(self._layout.params, self._layout.shards, strict=True)):
            if param.ds_status == ZeroParamStatus.AVAILABLE and number not in self._set_masters:
                own = param.detach().reshape(-1)[shard.start : shard.start + shard.owned]
                param.ds_tensor.detach()[: shard.owned].copy_(own)

    def _stretches(self, sub_group: int) -> Iterator[tuple[int, int]]:
        """Return where to look in a sub-group, in elements: not where masters were set."""
        first = self._layout.stretches[sub_group].offset
        start = 0
        for number in self._layout.groups[sub_group]:
            if number in self._set_masters:
                offset = self._layout.shards[number].offset - first
                yield start, offset
                start = offset + self._layout.shards[number].numel
        yield start, self._layout.stretches[sub_group].numel
