"""Counters for a piece of training: operators, host reads, copies between host and device, memory kept.

The tests, the benchmarks and the probe count with these. They are dispatch modes: every operator that PyTorch
dispatches while the ``with`` block runs is seen, whoever calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = {"aten._local_scalar_dense", "aten.is_nonzero", "aten.item", "tolist"}


class Operators(TorchDispatchMode):
    """Counts operators by name, and copies into and out of the tensors ``host``.

    ``Tensor.tolist`` reads the host without an operator that a dispatch mode would see, so it is counted on its own.

    Args:
        host: host memory, recognised by its storage, so that it can be told from the device where that is the CPU too.
    """

    def __init__(self, host: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.copies_into_destinations = 0
        """Copies into ``host``."""
        self.bytes_to_host = 0
        self.copies_from_host = 0
        """Operators that bring values of ``host`` elsewhere; sums and norms of them are none."""
        self.bytes_from_host = 0
        self._host = {_address(tensor) for tensor in host}

    def __enter__(self) -> Operators:
        original = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:
            self.counts["tolist"] += 1
            return original(tensor)

        self._patch = patch.object(torch.Tensor, "tolist", tolist)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        self.counts[name] += 1
        result = func(*args, **(kwargs or {}))
        if self._host:
            self._note_traffic(name, args, result)
        return result

    def _note_traffic(self, name: str, args: Any, result: Any) -> None:
        if name == "aten._foreach_copy_":
            for destination, source in zip(args[0], args[1], strict=True):
                self._note_traffic("aten.copy_", (source,), destination)
        if not isinstance(result, torch.Tensor):
            return
        if self._is_host(result):
            if name == "aten.copy_":
                self.copies_into_destinations += 1
                self.bytes_to_host += _bytes(result)
            return
        for source in tree_leaves(args):
            if isinstance(source, torch.Tensor) and self._is_host(source) and 1 < source.numel() <= result.numel():
                self.copies_from_host += 1
                self.bytes_from_host += _bytes(source)

    def _is_host(self, tensor: torch.Tensor) -> bool:
        return _address(tensor) in self._host

    @property
    def host_reads(self) -> int:
        return sum(self.counts[name] for name in HOST_READS)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def summary(self) -> Counter[str]:
        return Counter(
            {"operators": self.total, "reads": self.host_reads, "host copies": self.copies_into_destinations}
        )


class Collectives(TorchDispatchMode):
    """Counts collectives, and the bytes of the tensors handed to them, by the names of :attr:`NAMES`.

    Bytes are those of the whole tensor: the input of reductions and exchanges, the output of gathers.

    Args:
        smallest: collectives of fewer bytes are left out, such as norms and flags.
    """

    NAMES: ClassVar[dict[str, tuple[str, int]]] = {
        "allreduce_": ("all-reduce", 0),
        "allreduce_coalesced_": ("all-reduce", 0),
        "reduce_": ("reduce", 0),
        "broadcast_": ("broadcast", 0),
        "alltoall_base_": ("all-to-all", 1),
        "reduce_scatter_": ("reduce-scatter", 1),
        "_reduce_scatter_base_": ("reduce-scatter", 1),
        "allgather_": ("all-gather", 0),
        "_allgather_base_": ("all-gather", 0),
    }
    """Operator of ``torch.distributed`` -> name, and the argument that holds the whole tensor."""

    def __init__(self, smallest: int = 0) -> None:
        super().__init__()
        self.smallest = smallest
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, _, operator = str(func.overloadpacket).partition(".")
        if library == "c10d" and operator in self.NAMES:
            name, position = self.NAMES[operator]
            size = sum(_bytes(each) for each in tree_leaves(args[position]) if isinstance(each, torch.Tensor))
            if size >= self.smallest:
                self.counts[name] += 1
                self.bytes[name] += size
        return func(*args, **(kwargs or {}))


class Allocations(TorchDispatchMode):
    """Tracks the memory that operators have allocated and that is still in use, whatever holds it.

    Scalars are left out: norms and flags are meant to stay.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int, int]] = {}  # reference, address, bytes
        self._ignored: set[int] = set()
        self._upper_bound = 0
        self.peak_bytes = 0
        """The most bytes that were in use at once since :meth:`restart_peak`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and self.counts(tensor) and _address(tensor) not in given:
                self._note(tensor.untyped_storage())
        return result

    def counts(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 1 and not tensor.is_meta

    def _note(self, storage: torch.UntypedStorage) -> None:
        reference = StorageWeakRef(storage)
        self._made[reference.cdata] = reference, storage.data_ptr(), storage.nbytes()
        self._upper_bound += storage.nbytes()
        # Freed memory is found by looking at all storages: only where there may be a new peak, not every time.
        if self._upper_bound > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave the storages of these tensors out from now on."""
        self._ignored |= {_address(tensor) for tensor in tensors}

    def restart_peak(self) -> None:
        self.peak_bytes = self.bytes_in_use

    @property
    def bytes_in_use(self) -> int:
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        self._upper_bound = sum(size for _, address, size in self._made.values() if address not in self._ignored)
        return self._upper_bound


def host_memory(engine: Any) -> list[torch.Tensor]:
    """Return the host gradients of an engine of either kind, and its host sums; empty without CPU offload."""
    if getattr(engine.optimizer, "offload_optimizer", False):  # stage 3
        masters = engine.optimizer.fp32_partitioned_groups_flat
        return [engine.optimizer.grad_partitions_flat_buffer, *(master.grad for master in masters)]
    if not getattr(engine.optimizer, "cpu_offload", False):
        return []
    gradients = [master.grad for master in engine.optimizer.single_partition_of_fp32_groups]
    return [*(each for each in gradients if each is not None), *engine.optimizer.accumulated_grads_in_cpu.values()]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
