"""The interface of accumulators: the running gradient sum of one parameter group, of what this rank owns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from requestzero.zero.common.norm import square_of, vector_norm, vector_norms
from requestzero.zero.stage_1_and_2.bucket_runs import Run
from requestzero.zero.stage_1_and_2.layout import GroupLayout, Place

CountsInNorm = Callable[[int], bool]
"""Tells by a parameter's id whether this rank counts it in the norm; others count what is replicated."""


@dataclass(frozen=True)
class SavedSum:
    """A sum in a checkpoint."""

    read_into: Callable[[torch.Tensor, int, int], None]
    """Fills a flat tensor with a parameter's sum: tensor, parameter id, first element within the parameter."""
    used: frozenset[int]
    """Ids of parameters with a gradient in the window."""
    norms: Mapping[int, torch.Tensor]
    """Norms of owned parts that were computed in backwards, scalars on the accelerator, by parameter id."""
    edited: bool
    """A user has set a gradient."""


class Accumulator(ABC):
    """One parameter group's sum over the update window.

    Args:
        group: layout of the group.
        dtype: of the sum.
        counts: see ``CountsInNorm``.
    """

    def __init__(self, group: GroupLayout, dtype: torch.dtype, counts: CountsInNorm) -> None:
        self.group, self.dtype = group, dtype
        self._counts = counts
        self._all_count: bool | None = None

    @property
    def places(self) -> Mapping[int, Place]:
        """The part of each reduced gradient that goes into the sum, and its place there, by parameter id."""
        return self.group.owned

    def has_begun(self, param_id: int) -> bool:
        """Return whether the sum holds this window's value of a parameter, zero included, to which more is added."""
        return True

    @abstractmethod
    def add(self, run: Run, request_ends: bool) -> None:
        """Add reduced gradients, on the current stream; ``request_ends`` with this backward."""

    @abstractmethod
    def end_request(self) -> None:
        """Bring the sum to where it is kept between requests."""

    @abstractmethod
    def refresh_norm(self) -> None:
        """Bring :meth:`squared_norm` up to date."""

    def complete(self) -> None:
        """Make what the step reads the window's sum, zero for parameters that were absent."""
        self.refresh_norm()

    @abstractmethod
    def fragment(self, param_id: int) -> torch.Tensor:
        """Return the owned part of a parameter's sum as a view, to be read or written by a user. Flat."""

    def step_fragment(self, param_id: int) -> torch.Tensor:
        """Return the owned part of a parameter's completed sum as the step reads it. Flat."""
        return self.fragment(param_id)

    @abstractmethod
    def squared_norm(self) -> torch.Tensor | None:
        """Return the squared norm of what this rank owns and counts, a scalar on its device; ``None`` is zero."""

    @abstractmethod
    def note_edit(self) -> None:
        """Note that a user has set a gradient: norms that were computed in backward no longer describe it."""

    def unused_parameters(self) -> list[int]:
        """Return ids of owned parameters without a gradient in this window; none where that is not known."""
        return []

    @abstractmethod
    def discard(self) -> None:
        """Forget the sum: the window is over."""

    @property
    def keeps_last_end(self) -> bool:
        """True if :meth:`go_back` needs no copy of :meth:`tensors`, since the sum stands elsewhere too."""
        return False

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that hold the sum now."""

    @abstractmethod
    def go_back(self, saved: Sequence[torch.Tensor], state: Any) -> None:
        """Make the sum what it was when ``saved`` were copies of :meth:`tensors` and ``state`` was :meth:`state`.

        ``saved`` is of no use where the sum :attr:`keeps_last_end`.
        """

    @abstractmethod
    def state(self) -> Any:
        """Return what has to be known beside :meth:`tensors` to go back to the present sum."""

    @abstractmethod
    def load(self, saved: SavedSum) -> None:
        """Begin a window with the sum of a checkpoint, between requests."""

    @property
    def device_bytes(self) -> int:
        """Bytes that the sum occupies on the accelerator now."""
        return 0

    @property
    def step_gradient(self) -> Any:
        """The entry of DeepSpeed's ``averaged_gradients``; ``None`` where the step reads the host."""
        return None

    @abstractmethod
    def move(self, device: Any) -> None:
        """Move what lies on the accelerator to ``device``, or back."""

    def _counts_all(self) -> bool:
        """Return whether this rank counts all that it owns of the group in the norm."""
        if self._all_count is None:
            self._all_count = all(map(self._counts, self.group.owned))
        return self._all_count

    def _square(self, flat: torch.Tensor, places: Mapping[int, Place]) -> torch.Tensor | None:
        """Squared norm of what counts of ``flat``, in which the owned parts of parameters lie at ``places``."""
        if self._counts_all() and len(places):
            return vector_norm(flat).square()
        parts = [flat.narrow(0, place.offset, place.numel) for i, place in places.items() if self._counts(i)]
        return square_of(vector_norms(parts))
