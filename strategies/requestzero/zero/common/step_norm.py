"""The norm of a window's gradient, its check for inf and NaN, and its divisor: one all-reduce and one read per step.

Norms stay on the device; one all-reduce sums those of all groups over the ranks, and one host read brings them. A norm
is finite exactly when DeepSpeed's ``step`` would go on, so it is the overflow check as well: it describes the latest
value of the sum, and an overflow that later gradients cancel leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.utils import get_norm_dtype

from requestzero.zero.common.divisor import StepDivisor
from requestzero.zero.common.norm import cause_of_overflow
from requestzero.zero.common.ranks import Ranks
from requestzero.zero.common.window import UpdateWindow


class MeasuredSums(Protocol):
    """The sums of a window, as far as their norm is concerned."""

    def squared_norms(self) -> list[torch.Tensor | None]:
        """Return this rank's squared norm of every parameter group, scalars on the device; ``None`` is zero."""
        ...

    def unused_parameters(self) -> list[str]:
        """Return names of owned parameters without a gradient in this window, where that is known."""
        ...


class StepNorm:
    """Reads what a step has to know.

    Args:
        sums: of the window.
        divisor: of the step.
        ranks: the data-parallel ranks.
        refuses_unused: raise where a parameter has no gradient (``ignore_unused_parameters: false``).
        average_expert_norms: changes the norms of expert groups in place (mixture of experts); ``None`` without them.
    """

    def __init__(
        self,
        sums: MeasuredSums,
        divisor: StepDivisor,
        ranks: Ranks,
        refuses_unused: bool,
        average_expert_norms: Callable[[list[torch.Tensor]], None] | None,
    ) -> None:
        self._sums, self._divisor, self._ranks = sums, divisor, ranks
        self.refuses_unused = refuses_unused
        self._average_expert_norms = average_expert_norms
        self._read: list[float] | None = None
        self.unread: torch.Tensor | None = None
        """The norm that nothing had to know on the host, times loss scale and divisor, a scalar on the device."""
        self.cause: str | None = None
        """``"inf"`` or ``"NaN"`` if what was last read is not finite; ``None``: finite, or not read."""

    def forget(self) -> None:
        """Forget what was read: the sums have changed since, or are gone."""
        self._read = None

    def is_finite(self, window: UpdateWindow) -> bool:
        """Return whether every rank's gradient is finite. Collective, one host read, unless it was read before.

        Raises:
            AssertionError, RuntimeError: see :meth:`read`.
        """
        return all(map(math.isfinite, self.read(window)))

    def read(self, window: UpdateWindow) -> list[float]:
        """Return the norm of every group over all ranks. Collective, one host read, unless it was read before.

        Raises:
            AssertionError: on all ranks, if an unused parameter is not allowed and there is one.
            RuntimeError: on all ranks, if their divisors or weights give no divisor.
        """
        if self._read is None:
            reduced = self._ranks.read(self._reduce(window))
            groups = len(reduced) - 1 - StepDivisor.ENTRIES
            squares, unused = reduced[:groups], reduced[groups]
            if unused:
                self._refuse_unused(int(unused))
            self._divisor.check(reduced[groups + 1 :], window)
            self.cause = cause_of_overflow(squares)
            self._read = [math.sqrt(square) for square in squares]
        return self._read

    def take_total(self, window: UpdateWindow) -> float:
        """Return the norm over all groups and ranks, times loss scale and divisor, and forget it. See :meth:`read`."""
        total = math.hypot(*self.read(window))
        self.forget()
        return total

    def total_on_device(self, window: UpdateWindow) -> torch.Tensor:
        """Return :meth:`take_total` as an fp32 scalar without a host read (collective, unless it was read before)."""
        if self._read is not None:
            return torch.tensor(self.take_total(window))
        return self._reduce(window)[: -1 - StepDivisor.ENTRIES].sum().sqrt().float()

    def read_squares(self, window: UpdateWindow) -> list[float]:
        """Return the squared norm of every group as it is now, over all ranks. Collective, one host read."""
        return self._ranks.read(self._reduce(window))[: -1 - StepDivisor.ENTRIES]

    def read_divisor(self, window: UpdateWindow) -> None:
        """Agree on the divisor alone, where the norms cannot be read with it. Collective, one host read.

        Raises:
            RuntimeError: on all ranks, see :meth:`StepDivisor.check`.
        """
        entries = torch.zeros(
            StepDivisor.ENTRIES, dtype=get_norm_dtype(), device=get_accelerator().current_device_name()
        )
        self._divisor.write(entries, 0, window)
        self._ranks.sum(entries)
        self._divisor.check(self._ranks.read(entries), window)

    def _reduce(self, window: UpdateWindow) -> torch.Tensor:
        """Return, summed over ranks: every group's squared norm, the unused parameter shards, the divisor's entries."""
        squares = self._sums.squared_norms()
        groups = len(squares)
        size = groups + 1 + StepDivisor.ENTRIES
        sums = torch.zeros(size, dtype=get_norm_dtype(), device=get_accelerator().current_device_name())
        for group, square in enumerate(squares):
            if square is not None:
                sums[group] = square
        if self.refuses_unused:
            sums[groups] = len(self._sums.unused_parameters())
        self._divisor.write(sums, groups + 1, window)
        self._ranks.sum(sums)
        if self._average_expert_norms is not None:
            norms = list(sums[:groups].sqrt())
            self._average_expert_norms(norms)
            sums[:groups] = torch.stack(norms).square()
        return sums

    def _refuse_unused(self, unused: int) -> None:
        raise AssertionError(
            f"{unused} parameter shards received no gradient in this update window (on this rank: "
            f"{', '.join(self._sums.unused_parameters()) or 'none'}), and zero_optimization.ignore_unused_parameters "
            "is false: set it to true, or let every parameter take part."
        )
