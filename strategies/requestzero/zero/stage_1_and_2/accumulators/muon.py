"""The sum of a group whose gradients become Muon updates on the accelerator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from requestzero.zero.common.norm import square_of, vector_norms
from requestzero.zero.stage_1_and_2.accumulators.accumulator import CountsInNorm
from requestzero.zero.stage_1_and_2.accumulators.device import DeviceAccumulator
from requestzero.zero.stage_1_and_2.layout import GroupLayout, Parameter, Place

Updates = list[torch.Tensor]
"""Flat updates of the owned parts, and padding, together ``partition_size`` elements."""


class MuonAccumulator(DeviceAccumulator):
    """Holds the whole sum of every parameter of which this rank owns a part, since Muon orthogonalizes matrices.

    DeepSpeed 0.19.8 applies Muon at every gradient accumulation boundary, where the momentum takes the gradient in.
    Over a window that has to happen once, on the whole, divided sum.

    Args:
        group, dtype, counts: see ``Accumulator``.
        params: of which this rank owns a part, in DeepSpeed's order, by id.
        apply: turns whole, divided gradients, in that order, into updates. Once per step: it stages the momentum.
        scale: gives loss scale times divisor.
    """

    def __init__(
        self,
        group: GroupLayout,
        dtype: torch.dtype,
        counts: CountsInNorm,
        params: Mapping[int, Parameter],
        apply: Callable[[list[torch.Tensor]], Updates],
        scale: Callable[[], float],
    ) -> None:
        super().__init__(group, dtype, counts)
        self._params, self._apply, self._scale = params, apply, scale
        self._updates: Updates | None = None
        self._whole: dict[int, Place] = {}
        end = 0
        for param_id, param in params.items():
            self._whole[param_id] = Place(0, end, param.numel())
            end += param.numel()
        self._numel = end

    @property
    @override
    def places(self) -> Mapping[int, Place]:
        return self._whole

    @property
    @override
    def numel(self) -> int:
        return self._numel

    @override
    def complete(self) -> None:
        """Turn the sum into updates, divided first. The step multiplies them by the scale again: they have none."""
        super().complete()
        flat = self.partition().flat
        wholes = [
            flat.narrow(0, place.offset, place.numel).view(self._params[param_id].shape)
            for param_id, place in self._whole.items()
        ]
        self._updates = self._apply([whole / self._scale() for whole in wholes])
        for param, update in zip(self._params.values(), self._unpadded(), strict=True):
            if not param.requires_grad:
                update.zero_()  # momentum alone makes an update, which would count in the norm

    @override
    def fragment(self, param_id: int) -> torch.Tensor:
        owned = self.group.owned[param_id]
        return super().fragment(param_id).narrow(0, owned.start, owned.numel)

    @override
    def squared_norm(self) -> torch.Tensor | None:
        if self._updates is None:
            if self._partition is None:
                return None
            return square_of(vector_norms([self.fragment(i) for i in self.group.owned if self._counts(i)]))
        # The updates are in the order of the owned parts; what follows them is padding, which is zero.
        counted = [
            update for param_id, update in zip(self._whole, self._unpadded(), strict=True) if self._counts(param_id)
        ]
        square = square_of(vector_norms(counted))
        return None if square is None else square * self._scale() ** 2

    def _unpadded(self) -> Sequence[torch.Tensor]:
        assert self._updates is not None
        updates = [update for update in self._updates if not getattr(update, "_zero_padding", False)]
        return updates[: len(self._whole)]

    @override
    def discard(self) -> None:
        super().discard()
        self._updates = None

    @property
    @override
    def step_gradient(self) -> Any:
        return super().step_gradient if self._updates is None else self._updates
