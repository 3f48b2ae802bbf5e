"""What a rank owns of a reduced bucket, in *runs*: neighbours in the gradient partition, handled by one operator each.

Gradients lie in a bucket in the order in which they came (last layer first at stage 2), in the partition in that of the
parameters. Where both orders agree a run is a slice of the bucket, else its parts are put in order by one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch


class Piece(NamedTuple):
    """The owned part of one parameter's gradient; positions and sizes in elements."""

    param_id: int
    group_idx: int
    offset: int
    """Where it begins in the group's partition."""
    start: int
    """Where it begins in the bucket."""
    numel: int
    begun: bool
    """Whether the partition holds a sum already, to which it is added."""

    def goes_on(self, before: Piece) -> bool:
        """Whether it follows ``before`` in the partition without a gap and is treated alike."""
        alike = (self.group_idx, self.begun) == (before.group_idx, before.begun)
        return alike and self.offset == before.offset + before.numel


@dataclass(frozen=True)
class Run:
    """Neighbouring pieces, and their values as one tensor of shape ``[numel]`` in the bucket's dtype."""

    pieces: list[Piece]
    values: torch.Tensor

    @property
    def group_idx(self) -> int:
        return self.pieces[0].group_idx

    @property
    def begun(self) -> bool:
        return self.pieces[0].begun

    @property
    def sizes(self) -> list[int]:
        return [piece.numel for piece in self.pieces]

    @property
    def param_ids(self) -> list[int]:
        return [piece.param_id for piece in self.pieces]

    def slice_of(self, partition: torch.Tensor) -> torch.Tensor:
        """Its place in the flat ``partition``, as a view."""
        return partition.narrow(0, self.pieces[0].offset, self.values.numel())


def runs_of(bucket: torch.Tensor, pieces: list[Piece]) -> Iterator[Run]:
    """The runs that ``pieces`` of a flat ``bucket`` form; no value is in two of them."""
    views: dict[int, torch.Tensor] = {}
    for run in _neighbours(pieces):
        if all(after.start == before.start + before.numel for before, after in pairwise(run)):
            values = bucket.narrow(0, run[0].start, sum(piece.numel for piece in run))
        else:
            views = views or _views(bucket, pieces)
            values = torch.cat([views[piece.start] for piece in run])
        yield Run(run, values)


def _neighbours(pieces: Iterable[Piece]) -> list[list[Piece]]:
    runs: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: (piece.group_idx, piece.offset)):
        if runs and piece.goes_on(runs[-1][-1]):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _views(bucket: torch.Tensor, pieces: list[Piece]) -> dict[int, torch.Tensor]:
    """Every piece's part of the bucket by its start, all cut out by one operator."""
    sizes: list[int] = []
    index_of: dict[int, int] = {}
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start > end:
            sizes.append(piece.start - end)  # what others own
        index_of[piece.start] = len(sizes)
        sizes.append(piece.numel)
        end = piece.start + piece.numel
    if end < bucket.numel():
        sizes.append(bucket.numel() - end)
    cut = bucket.split(sizes)
    return {start: cut[index] for start, index in index_of.items()}
