"""Where the device partition is between two requests of a window, and what moves for it.

At a request's end the partition is *published* (copied to the host gradient, once per group) and then *released* or
kept. A further request *restores* what was released: ahead of its first reduction, on a stream of its own, so that the
copy runs beside the loss and the backward; or, where memory is not pinned, when its first bucket comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup
from typing_extensions import override

from requestzero.zero.free_memory import MemoryWatch
from requestzero.zero.grad_norm import gradient_norms, partition_norm
from requestzero.zero.host_gradient import HostGradient


@dataclass
class PartitionTraffic:
    """What has moved between gradient partitions and host gradients on this rank; one partition is one group's."""

    publications: int = 0
    """Partitions that were copied to the host gradient."""
    published_bytes: int = 0
    """Bytes of the host gradient that those copies wrote."""
    restores: int = 0
    """Partitions that were copied back, early or not."""
    restored_bytes: int = 0
    """Bytes of the host gradient that those copies read."""
    early_restores: int = 0
    """Those of :attr:`restores` that began before the first reduction of their request."""
    kept: int = 0
    """Partitions that stayed on the device at a request's end."""
    released: int = 0
    """Partitions that were freed at a request's end."""


class TravellingPartition(HostGradient):
    """Written for DeepSpeed 0.19.8, which keeps the partition on the device until the step.

    Args:
        retain_gpu_grad_partition_until_step: true, false or ``"auto"``, see
            :class:`~requestzero.config.settings.RequestZeROSettings`.
    """

    def __init__(self, *args: Any, retain_gpu_grad_partition_until_step: bool | str = False, **kwargs: Any) -> None:
        self.retain_gpu_grad_partition_until_step = retain_gpu_grad_partition_until_step
        self.partition_traffic = PartitionTraffic()
        super().__init__(*args, **kwargs)
        if retain_gpu_grad_partition_until_step == "auto" and self.cpu_offload:
            element = self.gradient_accumulation_dtype.itemsize
            self._memory_watch = MemoryWatch(sum(int(self.partition_size[i]) * element for i in self._flat_groups))

    # --- publish ----------------------------------------------------------------------------------------------------

    def publish_partitions(self) -> None:
        """Copy what the host gradient does not hold yet."""
        self._wait_for_partitions(get_accelerator().current_stream())
        for group_idx in sorted(self.window.unpublished):
            self._publish(group_idx)
        self.window.unpublished.clear()

    def _publish(self, group_idx: int) -> None:
        partition, host = self.resident_partition(group_idx), self.host_gradient(group_idx)
        assert partition is not None
        value = self.copy_to_host(partition, host)
        if self._counts_whole(group_idx):
            self.window.partition_norms[group_idx] = partition_norm(value)
        else:
            params = self.params_in_partition[group_idx]
            norms = gradient_norms([self.owned_slice(param, value) for param in params])
            self.norm_for_param_grads.update(zip(map(self.get_param_id, params), norms, strict=True))
        self.window.published.add(group_idx)
        self.window.travelled.add(group_idx)
        self.window.on_host.update(map(self.get_param_id, self.params_in_partition[group_idx]))
        self.partition_traffic.publications += 1
        self.partition_traffic.published_bytes += host.nbytes

    # --- release, or keep -------------------------------------------------------------------------------------------

    def settle_partitions(self) -> None:
        """At a request's end, when everything is published: release the partitions that need not stay."""
        resident = [i for i in self._flat_groups if self.resident_partition(i) is not None and self._may_release(i)]
        if resident and self._keeps_partitions():
            self.partition_traffic.kept += len(resident)
        else:
            self.averaged_gradients.update(dict.fromkeys(resident))
            self.partition_traffic.released += len(resident)
        self.window.restored_ahead.clear()

    def _may_release(self, group_idx: int) -> bool:
        """Not with 16-bit masters, whose host gradient has rounded the sum."""
        return bool(self.host_gradient(group_idx).dtype == self.gradient_accumulation_dtype)

    def _keeps_partitions(self) -> bool:
        retain = self.retain_gpu_grad_partition_until_step
        return self._memory_watch.suffices() if retain == "auto" else bool(retain)

    # --- restore ----------------------------------------------------------------------------------------------------

    def restore_ahead(self) -> None:
        """Begin to bring back what the coming backward will reduce into, if it was released; waits for nothing.

        For every group that has been reduced into in this window. From pageable memory a copy would hold up the host,
        so that it is left to the first bucket there.
        """
        for group_idx in sorted(self.window.travelled):
            if self.resident_partition(group_idx) is None and self._copies_alone(self.host_gradient(group_idx)):
                self._restore_ahead(group_idx)

    def _copies_alone(self, host: torch.Tensor) -> bool:
        """Whether a copy from ``host`` to the device runs behind the host's back, or there is only one memory."""
        return self._traffic_stream is None or bool(get_accelerator().is_pinned(host))

    def _restore_ahead(self, group_idx: int) -> None:
        # On the stream that has released it, where the same memory may be given out again.
        flat = self._new_partition(group_idx, torch.empty)
        stream = self._traffic_stream
        if stream is not None:
            stream.wait_stream(get_accelerator().current_stream())
            for published in self._pending_offload_events.values():
                stream.wait_event(published)
        with get_accelerator().stream(stream):
            self._fill_from_host(flat, group_idx)
            self._note_ready(group_idx)
        self.averaged_gradients[group_idx] = GradPartitionBufferGroup([flat], flat)
        self.window.restored_ahead.add(group_idx)
        self.partition_traffic.early_restores += 1

    @cached_property
    def _traffic_stream(self) -> Any:
        """Where partitions are restored ahead; ``None`` on an accelerator that orders operations by itself."""
        return None if get_accelerator().resolves_data_dependency() else get_accelerator().Stream()

    @override
    def _build_compact_grad_partition_buffer(self, group_idx: int) -> Any:
        """Also restore a partition that is not there yet: the window's sum goes on from what was published.

        Without DeepSpeed's view of every parameter in it, which only its step on the device asks for.
        """
        if not self.cpu_offload:
            group = super()._build_compact_grad_partition_buffer(group_idx)
        else:
            begun = group_idx in self.window.published
            flat = self._new_partition(group_idx, torch.empty if begun else torch.zeros)
            if begun:
                self._fill_from_host(flat, group_idx)
            group = GradPartitionBufferGroup([flat], flat)
        self._note_ready(group_idx)
        return group

    def _new_partition(self, group_idx: int, make: Callable[..., torch.Tensor]) -> torch.Tensor:
        numel, device = self.host_gradient(group_idx).numel(), get_accelerator().current_device_name()
        return make(numel, dtype=self.gradient_accumulation_dtype, device=device)

    def _fill_from_host(self, flat: torch.Tensor, group_idx: int) -> None:
        host = self.host_gradient(group_idx)
        flat.copy_(host, non_blocking=True)
        self.partition_traffic.restores += 1
        self.partition_traffic.restored_bytes += host.nbytes

    def _note_ready(self, group_idx: int) -> None:
        """What the current stream has done to the partition so far comes before whatever others do to it."""
        if not get_accelerator().resolves_data_dependency():
            event = get_accelerator().Event()
            event.record(get_accelerator().current_stream())
            self.window.partition_ready[group_idx] = event

    # --- a partition that was restored ahead ------------------------------------------------------------------------

    def sum_on_device(self, group_idx: int) -> torch.Tensor | None:
        """The group's partition if it holds the sum; ``None`` where it is only a copy that was restored ahead."""
        copied = group_idx in self.window.restored_ahead - self.window.unpublished
        return None if copied else self.resident_partition(group_idx)

    @override
    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Also wait for what is being restored."""
        self._wait_for_partitions(get_accelerator().current_stream())
        super().offload_states(*args, **kwargs)
