"""A group's sum as DeepSpeed's step, ``safe_get_full_grad`` and ``safe_set_full_grad`` find it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from requestzero.zero.stage_1_and_2.accumulators.accumulator import Accumulator


class GradientFragments:
    """A sequence of one view for each owned parameter, looked up when it is used, since the sum moves.

    It stands in ``averaged_gradients`` (on the device) and ``offload_gradient_dict`` (CPU offload) of DeepSpeed 0.19.8,
    which reads ``flat_partition`` in the step and calls the methods below by these names.
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator

    @property
    def flat_partition(self) -> torch.Tensor | None:
        """The sum in one tensor of ``partition_size`` elements, if it is on the device."""
        (flat,) = self._accumulator.tensors()
        return flat

    def __len__(self) -> int:
        return len(self._accumulator.group.owned)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._accumulator.fragment(list(self._accumulator.group.owned)[index])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self._accumulator.fragment, self._accumulator.group.owned)

    def move_flat_partition(self, device: Any, non_blocking: bool = False) -> None:
        """Move the sum; the copy is waited for."""
        self._accumulator.move(device)

    def clear(self) -> None:
        """Hold nothing: called when states are offloaded."""
