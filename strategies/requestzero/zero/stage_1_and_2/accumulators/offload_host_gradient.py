"""The sum under CPU offload: the gradient on the host that the optimizer reads is the sum itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from requestzero.zero.common.norm import square_of, vector_norms
from requestzero.zero.stage_1_and_2.accumulators.accumulator import SavedSum
from requestzero.zero.stage_1_and_2.accumulators.offload_base import OffloadAccumulator
from requestzero.zero.stage_1_and_2.bucket_runs import Run


class HostGradientAccumulator(OffloadAccumulator):
    """Adds to the host gradient by way of the device, in no memory of its own.

    A parameter's first gradient of a window is copied there, further ones are added.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begun: set[int] = set()
        self._norms: dict[int, torch.Tensor] = {}  # of parameters whose host gradient has not changed since

    @override
    def has_begun(self, param_id: int) -> bool:
        return param_id in self._begun

    @override
    def add(self, run: Run, request_ends: bool) -> None:
        """Add a run, and at its request's end compute norms of the values that the host gets."""
        host, total = run.slice_of(self.host()), run.values
        if run.begun:
            # The sum may be wider than the reduction (Muon groups).
            total = total.to(torch.promote_types(total.dtype, self.dtype))
            total.add_(host.to(total.device, non_blocking=True))
        value = self.copies.to_host(total, host)
        self._begun.update(run.param_ids)
        self._used.update(run.param_ids)
        if request_ends:
            self._norms.update(zip(run.param_ids, vector_norms(value.split(run.sizes)), strict=True))
        else:
            for param_id in run.param_ids:  # its norm is computed at its request's end, or before the step
                self._norms.pop(param_id, None)

    @override
    def end_request(self) -> None:
        self._begin_absent()

    @override
    def refresh_norm(self) -> None:
        self._begin_absent()
        self.copies.wait()
        missing = [i for i in self.group.owned if (self._edited or i in self._used) and i not in self._norms]
        self._norms.update(zip(missing, self._host_norms(missing), strict=True))

    def _begin_absent(self) -> None:
        for param_id in self.group.owned:
            self._begin(param_id)

    def _begin(self, param_id: int) -> None:
        """Let the host gradient hold this window's sum of a parameter: zero, if it has not taken part yet."""
        if param_id not in self._begun:
            self._on_host(param_id).zero_()
            self._begun.add(param_id)

    @override
    def fragment(self, param_id: int) -> torch.Tensor:
        self.copies.wait()
        if self.window_is_open():  # else there is no sum: what the last step has read stays as it is
            self._begin(param_id)
        return self._on_host(param_id)

    @override
    def squared_norm(self) -> torch.Tensor | None:
        return square_of([norm for param_id, norm in self._norms.items() if self._counts(param_id)])

    @override
    def note_edit(self) -> None:
        self._edited = True
        self._norms.clear()

    def replace_norms(self, norms: Mapping[int, torch.Tensor]) -> None:
        """Put norms, by parameter id, in the place of those of the sums that the host gradient held."""
        self._norms.update({param_id: norms[param_id] for param_id in self.group.owned if param_id in norms})

    @override
    def discard(self) -> None:
        self._begun.clear()
        self._used.clear()
        self._norms.clear()
        self._edited = False

    @override
    def move(self, device: Any) -> None:
        """Do nothing: the sum is on the host."""

    @override
    def tensors(self) -> list[torch.Tensor]:
        self.copies.wait()
        return [self.host()]

    @override
    def state(self) -> Any:
        return set(self._begun), set(self._used), dict(self._norms), self._edited

    @override
    def go_back(self, saved: Sequence[torch.Tensor], state: Any) -> None:
        self.copies.wait()
        begun, used, norms, self._edited = state
        self._begun, self._used, self._norms = set(begun), set(used), dict(norms)
        for now, before in zip(self.tensors(), saved, strict=True):
            now.copy_(before, non_blocking=True)

    @property
    def norms(self) -> Mapping[int, torch.Tensor]:
        """Norms that were computed in backwards and still hold, by parameter id."""
        return self._norms

    @override
    def load(self, saved: SavedSum) -> None:
        self.copies.wait()
        for param_id, place in self.group.owned.items():
            saved.read_into(self._on_host(param_id), param_id, place.start)
        self._begun, self._used = set(self.group.owned), set(self.group.owned) & saved.used
        self._norms = {param_id: saved.norms[param_id] for param_id in self._used if param_id in saved.norms}
        self._edited = saved.edited
