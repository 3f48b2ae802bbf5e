"""Runs: what a rank owns of a reduced bucket, cut into stretches that one operator each can add to a sum.

Gradients lie in a bucket in the order in which they came (last layer first at stage 2), in the partition in that of the
parameters. Where both orders agree a run is a slice of the bucket, else its parts are put in order by one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from requestzero.zero.stage_1_and_2.scatter_plan import stretch


class Piece(NamedTuple):
    """The owned part of one parameter's gradient; positions and sizes in elements."""

    param_id: int
    group_idx: int
    offset: int
    """Its first element in the group's sum."""
    start: int
    """Its first element in the bucket."""
    numel: int
    begun: bool
    """True if the sum of this window has begun, so that the piece is added to it; else it is copied."""

    def goes_on(self, before: Piece) -> bool:
        """Return whether it follows ``before`` in the sum without a gap and is handled alike."""
        alike = (self.group_idx, self.begun) == (before.group_idx, before.begun)
        return alike and self.offset == before.offset + before.numel


@dataclass(frozen=True)
class Run:
    """Neighbouring pieces, and their values as one tensor of shape ``[numel]`` in the dtype of the reduction."""

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

    def in_dtype(self, dtype: torch.dtype) -> Run:
        """Return the run with its values in another dtype."""
        return Run(self.pieces, self.values.to(dtype))

    def slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the run's stretch of the flat sum, as a view."""
        return stretch(flat, self.pieces[0].offset, self.values.numel())


def runs_of(bucket: torch.Tensor, pieces: list[Piece]) -> Iterator[Run]:
    """Yield the runs that ``pieces`` of a flat ``bucket`` form; no value is in two of them."""
    views: dict[int, torch.Tensor] = {}
    for run in _neighbours(pieces):
        if all(after.start == before.start + before.numel for before, after in pairwise(run)):
            values = stretch(bucket, run[0].start, sum(piece.numel for piece in run))
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
    """Return every piece's part of the bucket by its start, all cut out by one operator."""
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
