"""A flat gradient partition, and its view of every owned parameter where somebody asks for one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup


class PartitionViews(GradPartitionBufferGroup):
    """Written for DeepSpeed 0.19.8, which makes all views with every partition; its step reads the partition alone.

    Args:
        flat_partition: of the group's ``partition_size`` elements.
        places: where each owned parameter begins in it, and how many of its elements are there, in order.
    """

    def __init__(self, flat_partition: torch.Tensor, places: Sequence[tuple[int, int]]) -> None:
        super().__init__([], flat_partition)
        self._places = places

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._complete()
        return super().__iter__()

    def __len__(self) -> int:
        self._complete()
        return super().__len__()

    def __getitem__(self, index: Any) -> Any:
        self._complete()
        return super().__getitem__(index)

    def _complete(self) -> None:
        """Parameters and what lies between them, which DeepSpeed counts too where it looks a parameter up."""
        if super().__len__():
            return
        filled = 0
        for offset, numel in [*self._places, (self.flat_partition.numel(), 0)]:
            if offset > filled:
                padding = self.flat_partition.narrow(0, filled, offset - filled)
                padding._zero_padding = True  # type: ignore[attr-defined]
                self.append(padding)
            if numel:
                self.append(self.flat_partition.narrow(0, offset, numel))
            filled = offset + numel

    def move_flat_partition(self, device: Any, non_blocking: bool = False) -> None:
        """As DeepSpeed's; views are made anew."""
        super().move_flat_partition(device, non_blocking=non_blocking)
        self.clear()
