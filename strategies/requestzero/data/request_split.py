"""Split the items of one request over the data-parallel ranks: a pure function of their number."""

from __future__ import annotations


def count_micro_batches(items: int, world_size: int, micro_batch_size: int) -> int:
    """Return the micro-batches that every rank runs for a request of ``items`` items."""
    return -(-items // (world_size * micro_batch_size))


def split_request(items: int, rank: int, world_size: int, micro_batch_size: int) -> list[list[int]]:
    """Return the positions of the items in each micro-batch of ``rank``; equally many micro-batches on every rank.

    The items keep their order. A round, one micro-batch on each rank, deals out up to ``world_size * micro_batch_size``
    of them one by one, so that the ranks' shares of a round differ by at most one item. Only the last round of a
    request can leave a rank without any: its list is then empty, and the rank runs a filler there.
    """
    round_size = world_size * micro_batch_size
    return [
        list(range(start + rank, min(start + round_size, items), world_size)) for start in range(0, items, round_size)
    ]
