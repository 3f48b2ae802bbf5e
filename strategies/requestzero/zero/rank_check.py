"""How an engine comes to its agreement."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from requestzero.rank_check.channel import Channel
from requestzero.rank_check.mailbox import Mailbox
from requestzero.rank_check.rank_agreement import RankAgreement
from requestzero.rank_check.watch import Watch


def join(optimizer: Any) -> None:
    """Let the ranks that share ``optimizer``'s gradients agree from now on, if there are several. Collective."""
    if dist.get_world_size(optimizer.dp_process_group) == 1:
        return
    channel = Channel(optimizer.dp_process_group)
    watch = Watch(Mailbox(channel.name, channel.rank, channel.world_size), channel.rank)
    optimizer.take_agreement(RankAgreement(channel, watch, lambda: optimizer.window, _namer(optimizer)))


def _namer(optimizer: Any) -> Any:
    def name_of(number: int) -> str:
        return str(optimizer.param_names[optimizer.param_dict[number]])

    return name_of
