"""Count what a piece of training does: tensor operators, host reads, copies into the host gradient."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
