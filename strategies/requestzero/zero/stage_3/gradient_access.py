"""Parts of this rank written from a whole value, and whole gradients read from the parts of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist


def write_shard(shard: torch.Tensor, value: torch.Tensor, rank: int) -> None:
    """Write a rank's part of a whole parameter's ``value`` into its shard, zeros where that is padding.

    DeepSpeed 0.19.8 reads beyond the value where the ranks do not divide the parameter, and raises on the last rank.
    """
    start = rank * shard.numel()
    part = value.flatten()[start : start + shard.numel()]
    shard[: part.numel()].copy_(part)
    shard[part.numel() :].zero_()


def gather_whole(shard: torch.Tensor, param: Any, group: Any) -> torch.Tensor:
    """Return the whole of which every rank has a shard, of the parameter's shape, in the shard's dtype. Collective.

    DeepSpeed 0.19.8 gathers in the dtype of the master weights, which rounds an fp32 sum for 16-bit ones.
    """
    whole = torch.empty(dist.get_world_size(group=group) * shard.numel(), dtype=shard.dtype, device=shard.device)
    dist.all_gather_into_tensor(whole, shard.contiguous(), group=group)
    return whole[: param.ds_numel].view(param.ds_shape)
