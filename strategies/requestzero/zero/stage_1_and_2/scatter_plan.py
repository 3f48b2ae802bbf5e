"""The plan of a reduce-scatter: which stretches of a bucket each rank owns, and where this rank finds its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from requestzero.zero.stage_1_and_2.layout import Share


class Part(NamedTuple):
    """A stretch of one parameter's gradient in a flat tensor; positions and sizes in elements."""

    param_id: int
    group_idx: int
    first: int
    """Its first element within the parameter."""
    start: int
    """Its first element within the tensor."""
    numel: int

    def cut(self, first: int, numel: int) -> Part | None:
        """Return what it has of the parameter's elements from ``first`` on; ``None``: nothing."""
        begin, end = max(self.first, first), min(self.first + self.numel, first + numel)
        if begin >= end:
            return None
        return Part(self.param_id, self.group_idx, begin, self.start + begin - self.first, end - begin)


@dataclass(frozen=True)
class ScatterPlan:
    """The parts of a bucket in the order of their owners."""

    parts: Sequence[Part]
    """Of all owners, in order; ``start`` within the bucket."""
    sizes: Sequence[int]
    """Elements that each rank owns."""
    own: Sequence[Part]
    """This rank's; ``start`` within what it receives."""
    in_order: bool
    """True if the bucket has the parts in this order already, without gaps."""

    def arranged(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return the values of all parts in the order of their owners: a view where the bucket has it."""
        if self.in_order:
            return stretch(bucket, self.parts[0].start, sum(self.sizes))
        return torch.cat([bucket.narrow(0, part.start, part.numel) for part in self.parts])

    @property
    def is_balanced(self) -> bool:
        """True if no rank owns more than twice the mean.

        Where one does, it would receive more from all others than the ring of an all-reduce brings it.
        """
        return len(self.sizes) * max(self.sizes) <= 2 * sum(self.sizes)


def stretch(flat: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    """Return a stretch of a flat tensor as a view, or the tensor itself where that is all of it."""
    return flat if numel == flat.numel() else flat.narrow(0, start, numel)


def plan_scatter(
    parts: Sequence[Part], shares: Mapping[int, Sequence[Share]], rank: int, rank_count: int
) -> ScatterPlan:
    """Return the plan for the parts of a bucket.

    Args:
        parts: what the bucket holds.
        shares: all ranks' parts of each parameter, by parameter id.
        rank: this one.
        rank_count: number of ranks.
    """
    owned: list[list[Part]] = [[] for _ in range(rank_count)]
    for part in parts:
        for share in shares[part.param_id]:
            cut = part.cut(share.start, share.numel)
            if cut is not None:
                owned[share.rank].append(cut)
    for each in owned:
        each.sort(key=lambda part: part.start)
    ordered = [part for each in owned for part in each]
    own, start = [], 0
    for part in owned[rank]:
        own.append(part._replace(start=start))
        start += part.numel
    return ScatterPlan(
        parts=ordered,
        sizes=[sum(part.numel for part in each) for each in owned],
        own=own,
        in_order=all(after.start == before.start + before.numel for before, after in pairwise(ordered)),
    )
