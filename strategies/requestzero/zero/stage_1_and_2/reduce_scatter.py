"""A reduce-scatter of uneven shares, by what the backend of a process group can do.

- gloo (PyTorch 2.13): its ``reduce_scatter`` and ``reduce_scatter_tensor`` accept fp16, bf16, fp32 and fp64, and uneven
  shares, but all-reduce the whole input, and move as much (measured on the wire). Its ``all_to_all_single`` accepts the
  same and moves half: ranks exchange shares, and each adds up its own.
- NCCL: ``reduce_scatter_tensor`` wants equal shares. With uneven ones ``reduce_scatter`` is one reduction to each rank,
  all of them in one group call, which moves no more.
- others: equal shares, padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed

Scatter = Callable[[Any, torch.Tensor, Sequence[int], int, Any], torch.Tensor]
"""Returns this rank's share of a sum over ranks: communication, values by owner, shares' sizes, rank, group."""


def exchange(comm: Any, values: torch.Tensor, sizes: Sequence[int], rank: int, group: Any) -> torch.Tensor:
    """Send every rank its share, and add up what comes, in the order of ranks (16-bit values in fp32). Collective."""
    received = values.new_empty(len(sizes), sizes[rank])
    comm.all_to_all_single(received, values, [1] * len(sizes), list(sizes), group=group)
    return received.sum(0)


def scatter_uneven(comm: Any, values: torch.Tensor, sizes: Sequence[int], rank: int, group: Any) -> torch.Tensor:
    """Reduce-scatter, with one reduction to each rank where shares are not equal. Collective."""
    share = values.new_empty(sizes[rank])
    if len(set(sizes)) == 1:
        comm.reduce_scatter_tensor(share, values, group=group)
    else:
        comm.reduce_scatter(share, list(values.split(list(sizes))), group=group)
    return share


def scatter_padded(comm: Any, values: torch.Tensor, sizes: Sequence[int], rank: int, group: Any) -> torch.Tensor:
    """Reduce-scatter of shares that are padded to the largest. Collective."""
    largest = max(sizes)
    if len(set(sizes)) > 1:
        padded = values.new_zeros(len(sizes), largest)
        for row, share in zip(padded, values.split(list(sizes)), strict=True):
            row.narrow(0, 0, share.numel()).copy_(share)
        values = padded.view(-1)
    received = values.new_empty(largest)
    comm.reduce_scatter_tensor(received, values, group=group)
    return received.narrow(0, 0, sizes[rank])


def choose_scatter(group: Any, device: torch.device) -> Scatter:
    """Return the function for the backend that a group has for tensors of ``device``."""
    config = torch.distributed.get_backend_config(group)
    backend = dict(each.split(":") for each in config.split(",")).get(device.type, "")
    return {"gloo": exchange, "nccl": scatter_uneven}.get(backend, scatter_padded)
