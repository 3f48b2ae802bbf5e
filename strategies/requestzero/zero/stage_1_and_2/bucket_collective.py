"""The collective that sums a bucket of gradients over ranks and divides by their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist

from requestzero.zero.common.ranks import Ranks
from requestzero.zero.stage_1_and_2.bucket import Entry
from requestzero.zero.stage_1_and_2.layout import GroupLayout, Share


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


class BucketCollective:
    """Reduces buckets.

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
        alike = all(group.process_group is ranks.group for group in groups)
        self._in_place = alike and not options.to_owners

    def dtype(self, comm_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that gradients are summed in. Ulysses sums in fp32, as DeepSpeed does."""
        in_fp32 = self._options.partitioned and self._options.sequence_parallel_size > 1
        return torch.float32 if in_fp32 else comm_dtype

    def reduce(self, bucket: torch.Tensor, entries: Sequence[Entry], comm_dtype: torch.dtype) -> torch.Tensor:
        """Return the reduced bucket, in which at least what this rank owns is valid. Collective.

        Args:
            bucket: flat, changed in place where it has the dtype of the sum.
            entries: the gradients in it.
            comm_dtype: dtype that was chosen for the reduction.
        """
        values = bucket.to(self.dtype(comm_dtype))
        if not self._options.partitioned:
            self._reduce_for_all(values)
            return values
        _divide(values, self._divisor)
        if self._in_place:
            self._all_reduce(values)
        else:
            self._reduce_for_owners(values, entries)
        return values

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

    def _reduce_for_owners(self, values: torch.Tensor, entries: Sequence[Entry]) -> None:
        """Sum what goes to the same ranks of the same process group by one collective each."""
        slices: dict[tuple[Any, int | None], list[torch.Tensor]] = {}
        for entry in entries:
            group = self._groups[entry.group_idx]
            for share, owner in self._owners(group, entry):
                part = values.narrow(0, entry.start + share.start, share.numel)
                slices.setdefault((group.process_group, owner), []).append(part)
        for (process_group, owner), parts in slices.items():
            self._reduce_parts(parts, process_group, owner)

    def _owners(self, group: GroupLayout, entry: Entry) -> list[tuple[Share, int | None]]:
        """Return the stretches of a gradient with the rank each goes to; ``None``: to all."""
        shares = group.shares[entry.param_id]
        whole = len(shares) > 1 and self._needs_whole(group.index)
        everybody = whole or not self._options.to_owners
        return [(share, None if everybody else share.rank) for share in shares]

    def _reduce_parts(self, parts: list[torch.Tensor], process_group: Any, owner: int | None) -> None:
        flat = torch.cat(parts)
        if owner is None:
            self._ranks.comm.all_reduce(flat, group=process_group)
        else:
            self._ranks.comm.reduce(flat, dist.get_global_rank(process_group, owner), group=process_group)
        if owner in (None, dist.get_rank(group=process_group)):
            torch._foreach_copy_(parts, flat.split([part.numel() for part in parts]))


def _divide(values: torch.Tensor, divisor: float) -> None:
    if divisor != 1.0:
        values.div_(divisor)
