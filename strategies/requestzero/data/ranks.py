"""The data-parallel rank of a loader."""

from __future__ import annotations

from requestzero.config.validation import check_count


def check_ranks(owner: str, rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return ``(rank, world_size)`` as given, or ``None`` where neither is.

    Args:
        owner: the class that has the arguments, for messages.
        rank: data-parallel rank, from 0.
        world_size: number of data-parallel ranks.

    Raises:
        ValueError: one without the other, or out of range.
    """
    given = f"{owner}(rank={rank!r}, world_size={world_size!r}) is not allowed"
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ValueError(f"{given}: give both, or neither to have torch.distributed asked.")
    check_count("world_size", world_size, owner=owner)
    if not 0 <= rank < world_size:
        raise ValueError(f"{given}: ranks go from 0 to {world_size - 1}.")
    return rank, world_size


def distributed_ranks() -> tuple[int, int]:
    """Return ``(rank, world_size)`` of ``torch.distributed``; rank 0 of 1 where it is not initialized."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
