"""The collective that sums a bucket of gradients over ranks and divides by their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist

from requestzero.zero.common.ranks import Ranks
from requestzero.zero.stage_1_and_2.layout import GroupLayout
from requestzero.zero.stage_1_and_2.reduce_scatter import Scatter, choose_scatter, scatter_uneven
from requestzero.zero.stage_1_and_2.scatter_plan import Part, ScatterPlan, plan_scatter


@dataclass(frozen=True)
class ReductionOptions:
    """DeepSpeed's options of the reduction."""

    average: bool
    """Divide by the number of ranks (``gradient_allreduce_op``)."""
    partitioned: bool
    """Reduce for the owners of the gradients (``reduce_scatter``); else everything for everybody."""
    to_owners: bool
    """Reduce to each owner by a collective of its own (``use_multi_rank_bucket_allreduce: false``)."""
    divides_first: bool
    """``prescale_gradients``; without ``partitioned`` only."""
    predivide_factor: float
    """``gradient_predivide_factor``: divide by it before the sum and by the rest after it; likewise."""
    sequence_parallel_size: int
    """Sequence-parallel ranks count as one rank in the division."""


class Reduced(NamedTuple):
    """Gradients that have been reduced."""

    values: torch.Tensor
    """Flat; at least what this rank owns of :attr:`parts` is valid."""
    parts: Sequence[Part]


class BucketCollective:
    """Reduces buckets.

    By default a rank gets its own part of each bucket, by a reduce-scatter. Two things are all-reduced still: gradients
    that every owner of a part needs in full (Muon orthogonalizes whole matrices), and buckets of which one rank owns
    more than its peers could send it in the time of an all-reduce, where the backend sends directly. So are the buckets
    of a model with experts, whose groups of ranks differ by parameter.

    Args:
        options: of the reduction.
        groups: the layouts of all parameter groups.
        needs_whole: tells of a group by its index whether every owner of a split parameter needs all of its gradient.
        ranks: the data-parallel ranks.
    """

    def __init__(
        self,
        options: ReductionOptions,
        groups: Sequence[GroupLayout],
        needs_whole: Callable[[int], bool],
        ranks: Ranks,
    ) -> None:
        self._options, self._groups, self._needs_whole, self._ranks = options, groups, needs_whole, ranks
        self._divisor = ranks.size / options.sequence_parallel_size if options.average else 1.0
        self._scatters = all(group.process_group is ranks.group for group in groups) and not options.to_owners
        self._shares = {param_id: shares for group in groups for param_id, shares in group.shares.items()}
        self._rank = dist.get_rank(group=ranks.group)
        self._plan = lru_cache(maxsize=64)(self._make_plan)
        self._scatter: Scatter | None = None

    def dtype(self, comm_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that gradients are summed in. Ulysses sums in fp32, as DeepSpeed does."""
        in_fp32 = self._options.partitioned and self._options.sequence_parallel_size > 1
        return torch.float32 if in_fp32 else comm_dtype

    def reduce(self, bucket: torch.Tensor, parts: Sequence[Part], comm_dtype: torch.dtype) -> list[Reduced]:
        """Return the reduced bucket. Collective.

        Args:
            bucket: flat, changed in place where it has the dtype of the sum.
            parts: the gradients in it.
            comm_dtype: dtype that was chosen for the reduction.
        """
        values = bucket.to(self.dtype(comm_dtype))
        if not self._options.partitioned:
            self._reduce_for_all(values)
            return [Reduced(values, parts)]
        _divide(values, self._divisor)
        if self._ranks.size == 1:
            return [Reduced(values, parts)]
        if self._scatters:
            return self._reduce_and_scatter(values, parts)
        self._reduce_for_owners(values, parts)
        return [Reduced(values, parts)]

    # --- a reduce-scatter -------------------------------------------------------------------------------------------

    def _reduce_and_scatter(self, values: torch.Tensor, parts: Sequence[Part]) -> list[Reduced]:
        whole = [part for part in parts if self._is_needed_whole(part)]
        if not whole:
            return [self._scattered(values, parts)]
        flat = torch.cat([values.narrow(0, part.start, part.numel) for part in whole])
        self._all_reduce(flat)
        moved, start = [], 0
        for part in whole:
            moved.append(part._replace(start=start))
            start += part.numel
        rest = [part for part in parts if not self._is_needed_whole(part)]
        return [Reduced(flat, moved), *([self._scattered(values, rest)] if rest else [])]

    def _is_needed_whole(self, part: Part) -> bool:
        return len(self._shares[part.param_id]) > 1 and self._needs_whole(part.group_idx)

    def _scattered(self, values: torch.Tensor, parts: Sequence[Part]) -> Reduced:
        plan = self._plan(tuple(parts))
        scatter = self._scatter = self._scatter or choose_scatter(self._ranks.group, values.device)
        if not plan.is_balanced and scatter is not scatter_uneven:
            self._all_reduce(values)
            return Reduced(values, parts)
        values = plan.arranged(values)
        return Reduced(scatter(self._ranks.comm, values, plan.sizes, self._rank, self._ranks.group), plan.own)

    def _make_plan(self, parts: tuple[Part, ...]) -> ScatterPlan:
        return plan_scatter(parts, self._shares, self._rank, self._ranks.size)

    # --- all-reduces and reductions to owners -----------------------------------------------------------------------

    def _reduce_for_all(self, values: torch.Tensor) -> None:
        """Sum with the division before, after, or on both sides of the sum."""
        before = self._divisor if self._options.divides_first else self._options.predivide_factor
        before = before if self._options.average else 1.0
        _divide(values, before)
        self._all_reduce(values)
        _divide(values, self._divisor / before)

    def _all_reduce(self, values: torch.Tensor) -> None:
        if self._ranks.size > 1:
            self._ranks.comm.all_reduce(values, group=self._ranks.group)

    def _reduce_for_owners(self, values: torch.Tensor, parts: Sequence[Part]) -> None:
        """Sum what goes to the same ranks of the same process group by one collective each."""
        slices: dict[tuple[Any, int | None], list[torch.Tensor]] = {}
        for part in parts:
            group = self._groups[part.group_idx]
            everybody = not self._options.to_owners or self._is_needed_whole(part)
            for share in self._shares[part.param_id]:
                cut = part.cut(share.start, share.numel)
                if cut is not None:
                    owner = None if everybody else share.rank
                    stretch = values.narrow(0, cut.start, cut.numel)
                    slices.setdefault((group.process_group, owner), []).append(stretch)
        for (process_group, owner), stretches in slices.items():
            self._reduce_stretches(stretches, process_group, owner)

    def _reduce_stretches(self, stretches: list[torch.Tensor], process_group: Any, owner: int | None) -> None:
        flat = torch.cat(stretches)
        if owner is None:
            self._ranks.comm.all_reduce(flat, group=process_group)
        else:
            self._ranks.comm.reduce(flat, dist.get_global_rank(process_group, owner), group=process_group)
        if owner in (None, dist.get_rank(group=process_group)):
            torch._foreach_copy_(stretches, flat.split([stretch.numel() for stretch in stretches]))


def _divide(values: torch.Tensor, divisor: float) -> None:
    if divisor != 1.0:
        values.div_(divisor)
