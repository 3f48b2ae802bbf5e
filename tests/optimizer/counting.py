"""Count what a piece of training does: tensor operators, host reads, copies into the host gradient, memory kept."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = {"aten._local_scalar_dense", "aten.is_nonzero", "aten.item", "tolist"}


class Operators(TorchDispatchMode):
    """Operators by name, and copies whose destination is one of ``destinations``' storages.

    ``Tensor.tolist`` reads the host without an operator that a dispatch mode would see, so it is counted on its own.
    """

    def __init__(self, destinations: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.copies_into_destinations = 0
        self._storages = {t.untyped_storage().data_ptr() for t in destinations or []}

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
        if name == "aten.copy_" and args[0].untyped_storage().data_ptr() in self._storages:
            self.copies_into_destinations += 1
        return func(*args, **(kwargs or {}))

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


class Allocations(TorchDispatchMode):
    """Memory that operators have allocated and that is still in use, whoever holds it.

    Scalars are left out: norms and flags are meant to stay.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(t).data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.numel() > 1 and _storage(tensor).data_ptr() not in given:
                reference = StorageWeakRef(_storage(tensor))
                self._made[reference.cdata] = reference, _storage(tensor).nbytes()
                self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
        return result

    @property
    def bytes_in_use(self) -> int:
        return sum(size for reference, size in self._made.values() if not reference.expired())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
