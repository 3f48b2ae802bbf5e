"""Runs of a bucket: every owned value once, at its place, with as few tensors as the order of the pieces allows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from requestzero.zero.stage_1_and_2.bucket_runs import Piece, runs_of


@st.composite
def buckets(draw: st.DrawFn) -> tuple[int, list[Piece]]:
    """Pieces of two groups in any order, with gaps in the bucket (others' values) and in the partition (padding)."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    gaps = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    groups = sorted(draw(st.lists(st.integers(0, 1), min_size=len(sizes), max_size=len(sizes))))
    begun = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    offset, places = 0, []
    for numel, gap in zip(sizes, gaps, strict=True):
        places.append(offset + gap)
        offset += gap + numel
    start, pieces = 0, []
    for i in draw(st.permutations(range(len(sizes)))):
        start += draw(st.integers(0, 2))
        pieces.append(Piece(i, groups[i], places[i], start, sizes[i], begun[i]))
        start += sizes[i]
    return start + draw(st.integers(0, 2)), pieces


@given(buckets())
def test_every_value_is_in_one_run_at_its_place(drawn: tuple[int, list[Piece]]) -> None:
    size, pieces = drawn
    bucket = torch.arange(1.0, size + 1)
    partitions, expected = torch.zeros(2, 64), torch.zeros(2, 64)
    for piece in pieces:
        values = bucket[piece.start : piece.start + piece.numel]
        expected[piece.group_idx, piece.offset : piece.offset + piece.numel] += values
    runs = list(runs_of(bucket, pieces))
    for run in runs:
        run.slice_of(partitions[run.group_idx]).add_(run.values)
        assert {piece.begun for piece in run.pieces} == {run.begun}
        assert sum(run.sizes) == run.values.numel()
    assert torch.equal(partitions, expected)
    assert sorted(i for run in runs for i in run.param_ids) == sorted(piece.param_id for piece in pieces)


def test_neighbours_are_one_run_in_either_order() -> None:
    bucket = torch.arange(6.0)
    forward = [Piece(0, 0, 10, 0, 2, False), Piece(1, 0, 12, 2, 4, False)]
    (run,) = runs_of(bucket, forward)
    assert run.values.data_ptr() == bucket.data_ptr(), "a slice, where the orders agree"
    backward = [Piece(1, 0, 12, 0, 4, False), Piece(0, 0, 10, 4, 2, False)]
    (run,) = runs_of(bucket, backward)
    assert run.values.tolist() == [4, 5, 0, 1, 2, 3]
