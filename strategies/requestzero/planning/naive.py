"""The split that a plan is compared with: sequences in order, a fixed number per rank, padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def naive_micro_batches(lengths: Sequence[int], world_size: int, sequences: int) -> Iterator[tuple[int, list[int]]]:
    """Yield ``(rank, lengths)`` of each micro-batch that is no filler.

    A round deals out the next ``world_size * sequences`` sequences of the request one by one, as
    :class:`~requestzero.RequestLoader` does.
    """
    round_size = world_size * sequences
    for start in range(0, len(lengths), round_size):
        stop = min(start + round_size, len(lengths))
        for rank in range(min(world_size, stop - start)):
            yield rank, list(lengths[start + rank : stop : world_size])


def naive_count(sequences: int, world_size: int, per_rank: int) -> int:
    """Return the micro-batches of all ranks, fillers included."""
    return world_size * -(-sequences // (world_size * per_rank))
