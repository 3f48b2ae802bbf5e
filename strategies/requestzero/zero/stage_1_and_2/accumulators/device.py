"""The sum on the accelerator, in one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from typing_extensions import override

from requestzero.zero.common.streams import current_stream, keep_alive, record_event
from requestzero.zero.stage_1_and_2.accumulators.accumulator import Accumulator, SavedSum
from requestzero.zero.stage_1_and_2.accumulators.fragments import GradientFragments
from requestzero.zero.stage_1_and_2.bucket_runs import Run


class DevicePartition:
    """A flat tensor on the accelerator, and the event behind what has filled it."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._filled_on, self._filled = current_stream(), record_event()

    def wait(self) -> None:
        """Let the current stream use the tensor only when it has been filled."""
        stream = current_stream()
        if stream != self._filled_on:
            stream.wait_event(self._filled)

    def keep_alive(self) -> None:
        """Do not reuse the tensor's memory before the current stream has done what is queued on it by then."""
        if current_stream() != self._filled_on:
            keep_alive(self.flat, current_stream())


class DeviceAccumulator(Accumulator):
    """Begins at zero with the first reduced gradient of the window, and stays where it is until the step."""

    _partition: DevicePartition | None = None

    @property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return self.group.partition_size

    def partition(self) -> DevicePartition:
        """Return the flat tensor, filled with zeros if the window has had none."""
        if self._partition is None:
            device = get_accelerator().current_device_name()
            self._partition = DevicePartition(torch.zeros(self.numel, dtype=self.dtype, device=device))
        return self._partition

    @override
    def add(self, run: Run, request_ends: bool) -> None:
        partition = self.partition()
        partition.wait()
        run.slice_of(partition.flat).add_(run.values)

    @override
    def end_request(self) -> None:
        """Leave the sum where it is."""

    @override
    def refresh_norm(self) -> None:
        """Do nothing: the norm is computed when it is asked for."""

    @override
    def note_edit(self) -> None:
        """Do nothing, likewise."""

    @override
    def complete(self) -> None:
        self.partition().wait()

    @override
    def fragment(self, param_id: int) -> torch.Tensor:
        place = self.places[param_id]
        self.partition().wait()
        return self.partition().flat.narrow(0, place.offset, place.numel)

    @override
    def squared_norm(self) -> torch.Tensor | None:
        return None if self._partition is None else self._square(self._partition.flat, self.places)

    @override
    def discard(self) -> None:
        if self._partition is not None:
            self._partition.wait()  # its memory may be used anew from here on
            self._partition = None

    @override
    def tensors(self) -> list[torch.Tensor]:
        return [self.partition().flat]

    @override
    def state(self) -> Any:
        return None

    @override
    def go_back(self, saved: Sequence[torch.Tensor], state: Any) -> None:
        for now, before in zip(self.tensors(), saved, strict=True):
            now.copy_(before, non_blocking=True)

    @override
    def load(self, saved: SavedSum) -> None:
        flat = torch.zeros(self.numel, dtype=self.dtype, device=get_accelerator().current_device_name())
        for param_id, place in self.places.items():
            saved.read_into(flat.narrow(0, place.offset, place.numel), param_id, place.start)
        self._partition = DevicePartition(flat)

    @property
    @override
    def device_bytes(self) -> int:
        return 0 if self._partition is None else self._partition.flat.nbytes

    @property
    @override
    def step_gradient(self) -> Any:
        # Even where this rank has had no gradient of the group: reading one is collective, and it is zero.
        return GradientFragments(self)

    @override
    def move(self, device: Any) -> None:
        if self._partition is not None:
            self._partition.flat = self._partition.flat.to(device)
