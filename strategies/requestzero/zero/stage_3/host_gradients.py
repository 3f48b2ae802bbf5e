"""What an offloaded step reads: the sums themselves where that is possible, copies of them otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from requestzero.zero.common.partition_traffic import PartitionTraffic


class HostGradients:
    """The gradients of the master weights under CPU offload.

    Where a master weight has the dtype of the sums and lies where they do, its gradient *is* the sub-group's stretch of
    the sums: DeepSpeed's second buffer is dropped, and nothing is copied. Otherwise (16-bit sums for fp32 masters and
    the other way round, sums that ``reload_states`` has brought to the accelerator) a step copies once per sub-group.

    Args:
        masters: by sub-group.
        stretches: gives the sum of every sub-group as views.
        traffic: counts the copies.
    """

    def __init__(
        self,
        masters: Sequence[torch.Tensor],
        stretches: Callable[[], list[torch.Tensor]],
        traffic: PartitionTraffic,
    ) -> None:
        self._masters, self._stretches, self._traffic = masters, stretches, traffic
        self._shared = [False] * len(masters)
        self._current = False
        self.share()

    def share(self) -> None:
        """Let the gradients be the sums where they can, now that these have moved, or for the first time."""
        for index, (master, total) in enumerate(zip(self._masters, self._stretches(), strict=True)):
            can_share = (master.dtype, master.device) == (total.dtype, total.device)
            if can_share:
                master.grad = total
            elif self._shared[index]:
                master.grad = torch.zeros_like(master)
            self._shared[index] = can_share
        self._current = False

    def release(self) -> None:
        """Give up views of the sums, which are no memory of their own."""
        for master, shared in zip(self._masters, self._shared, strict=True):
            if shared:
                master.grad = None

    def note_change(self) -> None:
        """Note that the sums are others than were copied last."""
        self._current = False

    def publish(self) -> None:
        """Copy the sums that are no gradients themselves, unless that is done."""
        if self._current:
            return
        for gradient, total, shared in zip(self.gradients(), self._stretches(), self._shared, strict=True):
            if not shared:
                gradient.copy_(total, non_blocking=True)
                self._traffic.publications += 1
                self._traffic.published_bytes += gradient.nbytes
        self._current = True

    @property
    def all_shared(self) -> bool:
        """True where every gradient is a stretch of the sums."""
        return all(self._shared)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradient of every sub-group, flat, in the dtype of the master weights."""
        gradients = [master.grad for master in self._masters]
        assert all(gradient is not None for gradient in gradients)
        return gradients  # type: ignore[return-value]
