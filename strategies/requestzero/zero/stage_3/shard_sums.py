"""The window's sum: DeepSpeed's flat gradient buffer, and which parameters have taken part in it.

The first gradient of a parameter in a window replaces what the buffer holds of it, further ones are added, and before
the step the shards of parameters that were absent are zeroed. So a window is discarded by forgetting who took part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.utils import get_norm_dtype

from requestzero.zero.common.norm import square_of, vector_norm, vector_norms
from requestzero.zero.common.partition_traffic import PartitionTraffic
from requestzero.zero.stage_3.host_gradients import HostGradients
from requestzero.zero.stage_3.layout import ShardLayout
from requestzero.zero.window_checkpoint.record import SavedRank
from requestzero.zero.window_checkpoint.sums import OwnedPart, SavedSums


class ShardSums:
    """This rank's part of the window's sum.

    Args:
        layout: of the buffer.
        names: of parameters, by id.
        buffer: gives the flat buffer, which moves when states are offloaded.
        masters: weights of every sub-group under CPU offload, ``None`` without it.
        counts: tells by a parameter's id whether this rank counts it in the norm; others count what is replicated.
        factor: gives by a sub-group's index what its values lack of the step's scale: Muon's updates have none.
    """

    def __init__(
        self,
        layout: ShardLayout,
        names: Sequence[str],
        buffer: Callable[[], torch.Tensor],
        masters: Sequence[torch.Tensor] | None,
        counts: Callable[[int], bool],
        factor: Callable[[int], float] | None,
    ) -> None:
        self._layout, self._names, self._buffer = layout, names, buffer
        self._counted = [[number for number in group if counts(number)] for group in layout.groups]
        self._factor = factor
        self._begun: set[int] = set()
        self._views: list[torch.Tensor] = []
        self.traffic = PartitionTraffic()
        self.peak_device_bytes = 0
        """The most bytes that the sum has occupied on the accelerator at the end of a backward."""
        self.host = None if masters is None else HostGradients(masters, self.stretches, self.traffic)

    # --- places -----------------------------------------------------------------------------------------------------

    def shard(self, param_id: int) -> torch.Tensor:
        """Return what this rank owns of a parameter's sum as a view, padding included. Flat."""
        if not self._views:
            buffer = self._buffer()
            self._views = [buffer.narrow(0, shard.offset, shard.numel) for shard in self._layout.shards]
        return self._views[param_id]

    def stretches(self) -> list[torch.Tensor]:
        """Return the sum of every sub-group as a view. Flat."""
        buffer = self._buffer()
        return [buffer.narrow(0, *stretch) for stretch in self._layout.stretches]

    def note_move(self) -> None:
        """Note that the buffer has moved."""
        self._views = []
        if self.host is not None:
            self.host.share()

    # --- a backward -------------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Do nothing: the sum is where the reduction adds to it."""

    def add(self, param_ids: Sequence[int], partitions: Sequence[torch.Tensor]) -> None:
        """Add reduced gradients, on the current stream.

        Args:
            param_ids: of the parameters of which this rank owns something.
            partitions: what it owns of each, flat, in the accumulation dtype, without padding or with it.
        """
        pairs = list(zip(param_ids, partitions, strict=True))
        for begun, accumulate in ((False, _replace), (True, _add_where_values_are)):
            these = [pair for pair in pairs if (pair[0] in self._begun) is begun]
            if these:
                values = [value for _, value in these]
                accumulate([self.shard(param_id)[: value.numel()] for param_id, value in these], values)
        self._begun.update(param_ids)
        self.note_change()

    def begin(self, param_id: int) -> torch.Tensor:
        """Return the shard of a parameter with this window's sum in it, zero if it has not taken part."""
        shard = self.shard(param_id)
        if param_id not in self._begun:
            shard.zero_()
            self._begun.add(param_id)
            self.note_change()
        return shard

    def note_change(self) -> None:
        """Note that the sum is another than the host gradients were copied from."""
        if self.host is not None:
            self.host.note_change()

    def end_backward(self) -> None:
        """Note the bytes on the accelerator."""
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    # --- a step -----------------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Make what the step reads the window's sum: zero for parameters that were absent."""
        absent = [self.shard(number) for number in range(len(self._layout.shards)) if number not in self._begun]
        if absent:
            torch._foreach_zero_(absent)
            self._begun.update(range(len(self._layout.shards)))
            self.note_change()
        if self.host is not None:
            self.host.publish()

    def refresh_norms(self) -> None:
        """Bring what the norms are computed from up to date."""
        self.complete()

    def step_gradients(self) -> list[torch.Tensor]:
        """Return what the step reads, by sub-group. Flat."""
        return self.stretches() if self.host is None else self.host.gradients()

    def squared_norms(self) -> list[torch.Tensor | None]:
        """Return squared norms that add up to that of what this rank owns and counts, scalars; ``None`` is zero.

        One for everything where the step reads the buffer itself, else one for each sub-group.
        """
        self.complete()
        if self._factor is None and self._counts_all:
            in_buffer = self.host is None or self.host.all_shared
            return [vector_norm(flat).square() for flat in ([self._buffer()] if in_buffer else self.step_gradients())]
        return [self._square_of_counted(index) for index in range(len(self._layout.groups))]

    @property
    def _counts_all(self) -> bool:
        return self._counted == self._layout.groups

    def _square_of_counted(self, index: int) -> torch.Tensor | None:
        square = square_of(vector_norms([self.step_shard(number) for number in self._counted[index]]))
        if square is None or self._factor is None:
            return square
        return square.to(get_norm_dtype()) * self._factor(index) ** 2

    def step_shard(self, param_id: int) -> torch.Tensor:
        """Return what this rank owns of a parameter's completed sum as the step reads it. Flat."""
        offset, numel, *_ = self._layout.shards[param_id]
        index = next(i for i, group in enumerate(self._layout.groups) if group[0] <= param_id <= group[-1])
        return self.step_gradients()[index].narrow(0, offset - self._layout.stretches[index].offset, numel)

    def zero_frozen(self) -> None:
        """Zero what the step reads of frozen parameters."""
        for number, param in enumerate(self._layout.params):
            if not param.requires_grad:
                self.step_shard(number).zero_()

    def unused_parameters(self) -> list[str]:
        """Return nothing: stage 3 has no ``ignore_unused_parameters``."""
        return []

    def not_finite(self) -> list[str]:
        """Return names of the parameters whose owned sum is not finite as the step reads it. Reads every value."""
        self.complete()
        numbers = range(len(self._layout.shards))
        return [self._names[each] for each in numbers if not bool(self.step_shard(each).isfinite().all())]

    def discard(self) -> None:
        """Forget the sum: the window is over."""
        self._begun.clear()
        self.note_change()

    # --- going back -------------------------------------------------------------------------------------------------

    @property
    def keeps_last_end(self) -> bool:
        """False: the sum stands in one place."""
        return False

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensor that holds the sum."""
        return [self._buffer()]

    def state(self) -> frozenset[int]:
        """Return what has to be known beside :meth:`tensors` to go back to the present sum."""
        return frozenset(self._begun)

    def go_back(self, saved: Sequence[torch.Tensor], state: frozenset[int]) -> None:
        """Make the sum what it was when ``saved`` was a copy of :meth:`tensors` and ``state`` was :meth:`state`."""
        self._buffer().copy_(saved[0], non_blocking=True)
        self._begun = set(state)
        self.note_change()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    edited = False
    """Norms are read from the sums in the step, whether a user has set one or not."""

    def owned_parts(self) -> Iterator[OwnedPart]:
        """Yield what this rank owns of every parameter's sum, as views; zero for parameters that were absent."""
        for number, shard in enumerate(self._layout.shards):
            if shard.owned:
                whole, values = int(self._layout.params[number].ds_numel), self.begin(number)[: shard.owned]
                yield OwnedPart(self._names[number], shard.start, whole, values)

    def norms(self) -> dict[str, float]:
        """Return nothing: norms are read from the sums in the step."""
        return {}

    def load(self, sums: SavedSums, rank: SavedRank, unused: Collection[str]) -> None:
        """Begin a window with the sums of a checkpoint.

        Args:
            sums: of all ranks.
            rank: not needed here.
            unused: likewise.

        Raises:
            ValueError: the checkpoint has not the sums of these parameters.
        """
        for number, shard in enumerate(self._layout.shards):
            total = self.begin(number)
            if shard.owned:
                sums.read_into(total[: shard.owned], self._names[number], shard.start)
        self.note_change()

    @property
    def device_bytes(self) -> int:
        """Bytes that the sum occupies on the accelerator."""
        buffer = self._buffer()
        return buffer.nbytes if self.host is None and get_accelerator().on_accelerator(buffer) else 0


def _replace(totals: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    torch._foreach_copy_(totals, values, non_blocking=True)


def _add_where_values_are(totals: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Add ``values`` to ``totals`` in place, on the device of the values: a host would be slow at it."""
    if totals[0].device == values[0].device:
        torch._foreach_add_(totals, values)
        return
    moved = [total.to(value.device, non_blocking=True) for total, value in zip(totals, values, strict=True)]
    torch._foreach_add_(moved, values)
    torch._foreach_copy_(totals, moved, non_blocking=True)
