"""The sum under CPU offload with fp32 accumulation on a 16-bit model: a partition that is on the device when needed.

Within a request the sum is built on the accelerator. At the request's end it is copied to the host gradient, once per
group, and then released or kept. In the backward that ends the request what a bucket has completed is copied at once,
beside the reduction of the next one, unless the host gradient holds a sum that the window may go back to. The next
request reloads what was released: prefetched ahead of its first reduction, so that the copy runs beside the loss and
the backward; or, where the host gradient is not pinned, with its first bucket. Copies that run beside something else
have a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from typing_extensions import override

from requestzero.zero.common.partition_traffic import PartitionTraffic
from requestzero.zero.common.streams import current_stream, has_streams
from requestzero.zero.stage_1_and_2.accumulators.accumulator import SavedSum
from requestzero.zero.stage_1_and_2.accumulators.device import DevicePartition
from requestzero.zero.stage_1_and_2.accumulators.offload_base import OffloadAccumulator
from requestzero.zero.stage_1_and_2.bucket_runs import Run


class PartitionState(Enum):
    """The place of a group's sum."""

    EMPTY = "the window has no sum of this group yet"
    ON_HOST = "released: the host gradient alone holds the sum"
    PREFETCHED = "a copy of the host gradient is on the device, or on its way there; nothing was added since"
    CLEAN = "on the device, and copied to the host gradient"
    DIRTY = "on the device, with values that the host gradient does not have"


class PartitionAccumulator(OffloadAccumulator):
    """One group's partition.

    Args:
        group, dtype, counts, host, copies, window_is_open: see ``OffloadAccumulator``.
        traffic: counts copies, for all groups of an engine.
        stream: gives the stream of copies that run beside something else; ``None`` without streams.
        host_is_needed: tells whether the window may go back to what the host gradient holds.
    """

    def __init__(
        self,
        *args: Any,
        traffic: PartitionTraffic,
        stream: Callable[[], Any],
        host_is_needed: Callable[[], bool],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.state_of_partition = PartitionState.EMPTY
        self._traffic, self._stream, self._host_is_needed = traffic, stream, host_is_needed
        self._partition: DevicePartition | None = None
        self._copied: set[int] = set()  # ids of parameters whose present sum a bucket has copied to the host gradient
        self._square_norm: torch.Tensor | None = None  # of what was last copied to the host

    # --- within a request -------------------------------------------------------------------------------------------

    @override
    def add(self, run: Run, request_ends: bool) -> None:
        partition = self._resident()
        partition.wait()
        if not self._copied.isdisjoint(run.param_ids):  # reentrant checkpointing brings a parameter in two buckets
            self.copies.order_before(current_stream())
        total = run.slice_of(partition.flat).add_(run.values)
        self._used.update(run.param_ids)
        self.state_of_partition = PartitionState.DIRTY
        if request_ends and self._can_copy_early():
            self._copy_early(run, total)
        else:
            self._copied.difference_update(run.param_ids)

    def _can_copy_early(self) -> bool:
        """Return whether a copy would run beside the next bucket. One into pageable memory would hold up the host."""
        return not self._host_is_needed() and (not has_streams() or get_accelerator().is_pinned(self.host()))

    def _copy_early(self, run: Run, total: torch.Tensor) -> None:
        """Begin to copy a part of the sum that its request will not change any more; wait for nothing."""
        stream, host = self._stream(), run.slice_of(self.host())
        if stream is not None:
            stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(stream):
            self.copies.to_host(total, host)
        self._copied.update(run.param_ids)
        self._traffic.published_bytes += host.nbytes

    def _resident(self) -> DevicePartition:
        """Return the partition on the device; reload it, or begin it at zero."""
        if self._partition is None:
            if self.state_of_partition is PartitionState.EMPTY:
                flat = self._new(torch.zeros)
            else:
                flat = self._new(torch.empty)
                self._reload(flat)
            self._partition = DevicePartition(flat)
        return self._partition

    def _new(self, make: Callable[..., torch.Tensor]) -> torch.Tensor:
        return make(self.group.partition_size, dtype=self.dtype, device=get_accelerator().current_device_name())

    def _reload(self, flat: torch.Tensor) -> None:
        host = self.host()
        flat.copy_(host, non_blocking=True)
        self._traffic.restores += 1
        self._traffic.restored_bytes += host.nbytes

    def prefetch(self) -> None:
        """Begin to reload a released partition that gradients have come into in this window; wait for nothing.

        A copy from pageable memory would hold up the host, so that it is left to the first bucket there.
        """
        if self.state_of_partition is not PartitionState.ON_HOST or not self._used:
            return
        stream = self._stream()
        if stream is not None and not get_accelerator().is_pinned(self.host()):
            return
        # Allocated on the stream that has released it, where the same memory may be given out again.
        flat = self._new(torch.empty)
        if stream is not None:
            stream.wait_stream(get_accelerator().current_stream())
            self.copies.order_before(stream)
        with get_accelerator().stream(stream):
            self._reload(flat)
            self._partition = DevicePartition(flat)
        self.state_of_partition = PartitionState.PREFETCHED
        self._traffic.early_restores += 1

    # --- between requests -------------------------------------------------------------------------------------------

    @override
    def end_request(self) -> None:
        if self.state_of_partition is PartitionState.DIRTY:
            self._copy_to_host()
        self._begin_absent()

    def _copy_to_host(self) -> None:
        partition = self._resident()
        partition.wait()
        value = self._copy_rest(partition) if self._copied else self._copy_all(partition)
        self._square_norm = self._square(value, self.group.owned)
        self.state_of_partition = PartitionState.CLEAN
        self._traffic.publications += 1
        self._copied.clear()

    def _copy_all(self, partition: DevicePartition) -> torch.Tensor:
        """Copy the partition; return its values as the host gets them."""
        host = self.host()
        self._traffic.published_bytes += host.nbytes
        return self.copies.to_host(partition.flat, host)

    def _copy_rest(self, partition: DevicePartition) -> torch.Tensor:
        """Copy what no bucket has copied; return all values as the host gets them."""
        for start, numel in self._rest():
            host = self.host().narrow(0, start, numel)
            self.copies.to_host(partition.flat.narrow(0, start, numel), host)
            self._traffic.published_bytes += host.nbytes
        partition.keep_alive()
        return partition.flat.to(self.host().dtype)

    def _rest(self) -> Iterator[tuple[int, int]]:
        """Yield first element and size of every stretch that no bucket has copied, padding included."""
        end = 0
        for param_id, place in self.group.owned.items():
            if param_id in self._copied:
                if place.offset > end:
                    yield end, place.offset - end
                end = place.offset + place.numel
        if end < self.group.partition_size:
            yield end, self.group.partition_size - end

    def _begin_absent(self) -> None:
        """Let the host gradient hold this window's sum, which is zero if no gradient has come."""
        if self.state_of_partition is PartitionState.EMPTY:
            self.host().zero_()
            self.state_of_partition = PartitionState.ON_HOST

    @property
    def can_release(self) -> bool:
        """True if the host gradient can give the partition back: not with 16-bit masters, which have rounded it."""
        unchanged = self.state_of_partition in (PartitionState.CLEAN, PartitionState.PREFETCHED)
        return unchanged and self.keeps_last_end

    def keep(self) -> None:
        """Leave the partition on the device."""
        self._resident().wait()  # it may have been prefetched, and not been used since
        self.state_of_partition = PartitionState.CLEAN
        self._traffic.kept += 1

    def release(self) -> None:
        """Free the partition on the device."""
        self._free()
        self.state_of_partition = PartitionState.ON_HOST
        self._traffic.released += 1

    def _free(self) -> None:
        if self._partition is not None:
            self._partition.wait()  # a copy into its memory, which may be used anew from here on, may be under way
            self._partition = None

    # --- the step ---------------------------------------------------------------------------------------------------

    @override
    def refresh_norm(self) -> None:
        """Leave the host gradient as it is where it can: a request that is undone has to find it there."""
        if self.state_of_partition is PartitionState.DIRTY and self.keeps_last_end:
            partition = self._resident()
            partition.wait()
            self._square_norm = self._square(partition.flat, self.group.owned)
            return
        self.end_request()
        self.copies.wait()
        if self._edited:
            self._square_norm = self._square(self.host(), self.group.owned)
            if self._square_norm is not None:
                self._square_norm = self._square_norm.to(get_accelerator().current_device_name())

    @override
    def complete(self) -> None:
        self.end_request()
        self.refresh_norm()

    @override
    def squared_norm(self) -> torch.Tensor | None:
        return self._square_norm

    @override
    def discard(self) -> None:
        self._free()
        self.state_of_partition = PartitionState.EMPTY
        self._used.clear()
        self._copied.clear()
        self._square_norm, self._edited = None, False

    # --- users, rollback, moving ------------------------------------------------------------------------------------

    @override
    def fragment(self, param_id: int) -> torch.Tensor:
        if self._partition is not None:
            self._partition.wait()  # a copy under way would be missed by a read, and would overwrite a write
            if self._copied:  # or would get what is written
                self.copies.order_before(current_stream())
            place = self.group.owned[param_id]
            return self._partition.flat.narrow(0, place.offset, place.numel)
        self.copies.wait()
        if self.window_is_open():  # else there is no sum: what the last step has read stays as it is
            self._begin_absent()
        return self._on_host(param_id)

    @override
    def note_edit(self) -> None:
        self._edited = True
        if self._partition is not None:
            self.state_of_partition = PartitionState.DIRTY
            self._copied.clear()  # which one it was is not said

    @property
    def holds_sum_on_device(self) -> bool:
        """True if the partition on the device is the sum, and not only a copy that was prefetched."""
        return self.state_of_partition in (PartitionState.CLEAN, PartitionState.DIRTY)

    @property
    @override
    def keeps_last_end(self) -> bool:
        """True if the host gradient holds the same values: not with 16-bit masters, which have rounded them."""
        return self.host().dtype == self.dtype

    @override
    def tensors(self) -> list[torch.Tensor]:
        self.copies.wait()
        return [self._resident().flat if self.holds_sum_on_device else self.host()]

    @override
    def state(self) -> Any:
        self.end_request()  # a user may have set a gradient since
        return self.holds_sum_on_device, set(self._used), self._square_norm, self._edited

    @override
    def go_back(self, saved: Sequence[torch.Tensor], state: Any) -> None:
        on_device, used, self._square_norm, self._edited = state
        self._used = set(used)
        if self.keeps_last_end:
            if self.state_of_partition is PartitionState.DIRTY:
                self._free()
                self.state_of_partition = PartitionState.ON_HOST
            return
        self.copies.wait()
        (before,) = saved
        if on_device:
            self._resident().flat.copy_(before, non_blocking=True)
            self._copy_to_host()
            return
        self._free()
        self.host().copy_(before, non_blocking=True)
        self.state_of_partition = PartitionState.ON_HOST

    @override
    def load(self, saved: SavedSum) -> None:
        flat = self._new(torch.zeros)
        for param_id, place in self.group.owned.items():
            saved.read_into(flat.narrow(0, place.offset, place.numel), param_id, place.start)
        self._partition = DevicePartition(flat)
        self._used, self._edited = set(self.group.owned) & saved.used, saved.edited
        self.state_of_partition = PartitionState.DIRTY  # the request's end copies it to the host and finds the norm

    @property
    @override
    def device_bytes(self) -> int:
        return 0 if self._partition is None else self._partition.flat.nbytes

    @override
    def move(self, device: Any) -> None:
        if self._partition is not None:
            self._partition.wait()
            self._partition.flat = self._partition.flat.to(device)


class CopyStream:
    """The stream of copies that run beside something else, made when it is first needed."""

    def __init__(self) -> None:
        self._stream: Any = None

    def __call__(self) -> Any:
        if self._stream is None and has_streams():
            self._stream = get_accelerator().Stream()
        return self._stream
