"""``retain_gpu_grad_partition_until_step="auto"``: whether the device has memory to spare for gradient partitions."""

from __future__ import annotations

import logging

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

logger = logging.getLogger("requestzero")

FREE_SHARE = 0.1
"""Share of the device's memory that has to stay free beside partitions that are kept."""


def free_device_memory() -> int:
    """Bytes that this process could still allocate on its device, as far as is known without waiting for it.

    What the driver says is free and what the caching allocator holds unused. Where there is no driver to ask,
    DeepSpeed's accelerator counts the allocator's unused memory as free already, hence the upper limit.
    """
    device = get_accelerator()
    allocated = device.memory_allocated()
    unused = device.memory_reserved() - allocated
    return int(min(device.available_memory() + unused, device.total_memory() - allocated))


class MemoryWatch:
    """Decides at request ends, on this rank alone, and tells when its mind changes.

    Args:
        partition_bytes: bytes of all partitions of this rank.
    """

    def __init__(self, partition_bytes: int) -> None:
        self.margin = max(int(FREE_SHARE * get_accelerator().total_memory()), partition_bytes)
        """Bytes that have to be free beside the partitions: a share of the device's memory, or another partition."""
        self._suffices: bool | None = None
        free_device_memory()  # where DeepSpeed's accelerator cannot tell, it says so before training

    def suffices(self) -> bool:
        """Whether memory suffices to keep the partitions, which are on the device now."""
        free = free_device_memory()
        suffices = free >= self.margin
        if suffices != self._suffices:
            logger.info(
                "Rank %d %s its gradient partition between requests: %.0f MiB are free, and %.0f MiB have to be.",
                dist.get_rank(),
                "keeps" if suffices else "releases",
                free / 2**20,
                self.margin / 2**20,
            )
        self._suffices = suffices
        return suffices
