"""The data-parallel ranks that share an optimizer's gradients: their group, their agreement and their collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from deepspeed import comm as dist

from requestzero.rank_check.agreement import RankAgreement
from requestzero.rank_check.channel import Channel
from requestzero.rank_check.communication import WatchedCommunication
from requestzero.rank_check.interface import Agreement
from requestzero.rank_check.mailbox import Mailbox
from requestzero.rank_check.watch import Watch
from requestzero.zero.common.window import UpdateWindow
from requestzero.zero.patch import patched


class Ranks:
    """One data-parallel group.

    Args:
        group: the process group; DeepSpeed counts sequence-parallel ranks among it.
        model_parallel_all_reduce: ``f(tensor=..., op=...)`` sums over the model-parallel group, if there is one.
    """

    def __init__(self, group: Any, model_parallel_all_reduce: Callable[..., None]) -> None:
        self.group = group
        self.size: int = dist.get_world_size(group=group)
        self.agreement = Agreement()
        """Of this engine's ranks on what they are about to do; does nothing until :meth:`agree_from_now_on`."""
        self.comm: Any = dist
        """``deepspeed.comm``, or the same with waits that end where the ranks wait for different things."""
        self._model_parallel_all_reduce = model_parallel_all_reduce

    def agree_from_now_on(
        self,
        window: Callable[[], UpdateWindow],
        name_of: Callable[[int], str],
        equal_micro_batches: bool = True,
        votes: bool = False,
    ) -> None:
        """Let the ranks agree before their collectives, if there are several. Collective.

        Args:
            window: gives the engine's open window.
            name_of: gives the name of a parameter by its id.
            equal_micro_batches: all ranks run the same requests and micro-batches; else only the same windows.
            votes: agree before every backward that no rank aborts its request.
        """
        if self.size == 1:
            return
        channel = Channel(self.group)
        mailbox = Mailbox(channel.name, channel.ranks, channel.rank, channel.world_size)
        watch = Watch(mailbox, channel.rank, channel.timeout.total_seconds())
        agreement = RankAgreement(channel, watch, window, name_of, equal_micro_batches, votes)
        self.agreement, self.comm = agreement, WatchedCommunication(agreement)

    @contextmanager
    def watching(self, *modules: ModuleType) -> Iterator[None]:
        """Let the collectives that DeepSpeed's ``modules`` start in the block be waited for under watch, on the CPU."""
        with ExitStack() as stack:
            for module in modules if self.agreement.active else ():
                stack.enter_context(patched(module, "dist", self.comm))
            yield

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` in place over data-parallel ranks, then over model-parallel ones. Collective."""
        if self.size > 1:
            self.comm.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.group)
        self._model_parallel_all_reduce(tensor=tensor, op=dist.ReduceOp.SUM)

    def read(self, tensor: torch.Tensor) -> list[float]:
        """Read a tensor from its device: one host read, in a wait that ends where the ranks disagree."""
        self.agreement.wait_for_device(tensor.device)
        return list(tensor.tolist())
