"""Weights that a user has written since the last step, at stage 3: the master weights take them over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from requestzero.zero.common.streams import current_stream
from requestzero.zero.common.written_elements import adopt_elements, part_of
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
    only the comparison finds them, in fp32 too, where DeepSpeed's masters have memory of their own. Nothing here is
    collective.

    Args:
        optimizer: has laid out the flat memory.
        layout: of its parameters.
        compares: false: look for nothing.
    """

    def __init__(self, optimizer: FlatShards, layout: ShardLayout, compares: bool) -> None:
        self._optimizer, self._layout, self._compares = optimizer, layout, compares
        self._set_masters: dict[int, torch.Tensor] = {}
        """Parameter id -> this rank's part of the weight when its master was set, which it follows in the next step."""

    @torch.no_grad()
    def note_master(self, param: Any) -> None:
        """Note that the user has set the master of a parameter; it is right, not the weight, until that is written."""
        if self._compares:
            number = self._layout.id_of(param)
            self._bring_back([number])
            self._set_masters[number] = param.ds_tensor.clone()

    def forget_set_masters(self) -> None:
        """Note that the weights are the masters, rounded. A skipped step, or saving, leaves those that were set."""
        self._set_masters.clear()

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over what was written since the last step (this rank only; offload copies between host and device)."""
        if not self._compares:
            return
        self._bring_back(range(len(self._layout.params)))
        for index, weights in enumerate(self._optimizer.fp16_partitioned_groups_flat):
            masters = self._optimizer.fp32_partitioned_groups_flat[index].detach()
            for start, stop in self._stretches(index):
                adopt_elements(weights, masters, start, stop)
        for number, before in self._set_masters.items():
            self._adopt_later_write(number, before)

    def _adopt_later_write(self, number: int, before: torch.Tensor) -> None:
        """Let a master that was set take over the elements of its shard that are not what they were."""
        now, master = self._layout.params[number].ds_tensor, self._master(number)
        same = now.isclose(before.to(now.device), rtol=0.0, atol=0.0, equal_nan=True)
        torch.where(same.to(master.device), master, now.to(master.device), out=master)
        before.copy_(now)

    def _master(self, number: int) -> torch.Tensor:
        sub_group, shard = self._layout.sub_groups[number], self._layout.shards[number]
        start = shard.offset - self._layout.stretches[sub_group].offset
        return self._optimizer.fp32_partitioned_groups_flat[sub_group].detach()[start : start + shard.numel]

    def _bring_back(self, numbers: Iterable[int]) -> None:
        """Copy this rank's part of parameters that stay gathered into their shards."""
        shards: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        for number in numbers:
            param, shard = self._layout.params[number], self._layout.shards[number]
            if param.ds_status == ZeroParamStatus.AVAILABLE:
                shards.append(part_of(param.ds_tensor, 0, shard.owned))
                parts.append(part_of(param.reshape(-1), shard.start, shard.start + shard.owned))
        if shards:
            torch._foreach_copy_(shards, parts, non_blocking=True)
            if shards[0].device != parts[0].device:  # parameters are offloaded, and the host is about to read them
                current_stream().synchronize()

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
