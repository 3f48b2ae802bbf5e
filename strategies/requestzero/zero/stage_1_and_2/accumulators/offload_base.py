"""The common part of sums under CPU offload: the host gradient that the optimizer reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from deepspeed.accelerator import get_accelerator
from typing_extensions import override

from requestzero.zero.common.norm import vector_norms
from requestzero.zero.stage_1_and_2.accumulators.accumulator import Accumulator, CountsInNorm
from requestzero.zero.stage_1_and_2.accumulators.host_copies import HostCopies
from requestzero.zero.stage_1_and_2.layout import GroupLayout


class OffloadAccumulator(Accumulator):
    """Common part of both kinds of sums under CPU offload.

    Args:
        group, dtype, counts: see ``Accumulator``.
        host: gives the flat host gradient, of ``partition_size`` elements in the dtype of the master weights.
        copies: into host gradients, shared by all groups.
        window_is_open: tells whether the window has had any gradient, of any group.
    """

    def __init__(
        self,
        group: GroupLayout,
        dtype: torch.dtype,
        counts: CountsInNorm,
        host: Callable[[], torch.Tensor],
        copies: HostCopies,
        window_is_open: Callable[[], bool],
    ) -> None:
        super().__init__(group, dtype, counts)
        self.host, self.copies, self.window_is_open = host, copies, window_is_open
        self._used: set[int] = set()
        self._edited = False

    @property
    def edited(self) -> bool:
        """True if a user has set a gradient in the window."""
        return self._edited

    @override
    def unused_parameters(self) -> list[int]:
        return [param_id for param_id in self.group.owned if param_id not in self._used]

    @override
    def step_fragment(self, param_id: int) -> torch.Tensor:
        return self._on_host(param_id)

    def _on_host(self, param_id: int) -> torch.Tensor:
        place = self.group.owned[param_id]
        return self.host().narrow(0, place.offset, place.numel)

    def _host_norms(self, param_ids: Sequence[int]) -> list[torch.Tensor]:
        """Return norms of parameters' parts of the host gradient, on the accelerator."""
        if not param_ids:
            return []
        norms = torch.stack(vector_norms([self._on_host(param_id) for param_id in param_ids]))
        return list(norms.to(get_accelerator().current_device_name()).unbind())
