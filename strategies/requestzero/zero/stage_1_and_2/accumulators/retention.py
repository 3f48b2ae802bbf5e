"""Keep or release gradient partitions between requests, as ``retain_gpu_grad_partition_until_step`` says."""

from __future__ import annotations

import logging

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

logger = logging.getLogger("requestzero")

FREE_SHARE = 0.1
"""Share of the device's memory that has to stay free beside partitions that are kept."""


def free_device_memory() -> int:
    """Return the bytes that this process could still allocate on its device, as far as is known without waiting for it.

    They are what the driver reports as free and what the caching allocator holds unused. Where there is no driver to
    ask, DeepSpeed's accelerator counts the allocator's unused memory as free already, hence the upper limit.
    """
    device = get_accelerator()
    allocated = device.memory_allocated()
    unused = device.memory_reserved() - allocated
    return int(min(_free_for_the_driver() + unused, device.total_memory() - allocated))


def _free_for_the_driver() -> int:
    """Return the bytes that the driver reports as free.

    Of a GPU PyTorch is asked. DeepSpeed asks NVML, by a number that it reads from ``CUDA_VISIBLE_DEVICES``, which may
    hold UUIDs or number the devices in another order; and where a rank has a part of a GPU (MIG), NVML tells of the
    whole.
    """
    device = get_accelerator()
    return torch.cuda.mem_get_info()[0] if device.device_name() == "cuda" else int(device.available_memory())


class MemoryWatch:
    """Decides, on this rank alone, and logs when the decision changes.

    Args:
        margin: bytes that have to be free at least; a share of the device's memory has to be, too.
        what: is kept or not, for the log.
        verbs: for keeping and not keeping it.
    """

    def __init__(
        self,
        margin: int,
        what: str = "its gradient partition between requests",
        verbs: tuple[str, str] = ("keeps", "releases"),
    ) -> None:
        self.margin = max(int(FREE_SHARE * get_accelerator().total_memory()), margin)
        """Bytes that have to be free beside what is kept."""
        self._what, self._verbs = what, verbs
        self._suffices: bool | None = None
        free_device_memory()  # where DeepSpeed's accelerator cannot tell, it says so before training

    def suffices(self, needed: int = 0) -> bool:
        """Return whether memory suffices, where ``needed`` bytes are not on the device yet."""
        free = free_device_memory() - needed
        suffices = free >= self.margin
        if suffices != self._suffices:
            logger.info(
                "Rank %d %s %s: %.0f MiB are free, and %.0f MiB have to be.",
                dist.get_rank(),
                self._verbs[not suffices],
                self._what,
                free / 2**20,
                self.margin / 2**20,
            )
        self._suffices = suffices
        return suffices


class Retention:
    """The decision for all partitions of an engine.

    Args:
        option: the value of ``retain_gpu_grad_partition_until_step``: true, false or ``"auto"``.
        partition_bytes: bytes of all partitions of this rank; 0 where there are none to keep.
    """

    def __init__(self, option: bool | str, partition_bytes: int) -> None:
        # Beside the partitions, which are on the device, another one has to fit.
        self._watch = MemoryWatch(partition_bytes) if option == "auto" and partition_bytes else None
        self._keeps = option is True

    def keeps(self) -> bool:
        """Return whether partitions stay on the device after the request that has just ended."""
        return self._keeps if self._watch is None else self._watch.suffices()
