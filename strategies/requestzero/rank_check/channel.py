"""The process group on which ranks compare intents: gloo on the CPU, beside the one that reduces gradients."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from requestzero.rank_check.intent import NUMBERS, VOTES, Intent, Kind

# The watch ends a wait before the group does: its message says more.
_LATER = timedelta(minutes=1)
_engines: Counter[str] = Counter()
"""Channels that were built so far, by :attr:`Channel.ranks`."""


class Round:
    """One comparison under way: the largest and, negated, the smallest of every number, over all ranks.

    Args:
        intent: this rank's.
        buffer: int64, of shape ``[2 * NUMBERS]``; used until the work is done.
        bounds: the same memory as a NumPy array.
        group: of the ranks.
    """

    def __init__(self, intent: Intent, buffer: torch.Tensor, bounds: Any, group: dist.ProcessGroup) -> None:
        self.intent = intent
        self._bounds = bounds
        numbers = intent.numbers()
        self._bounds[:] = numbers + [-number for number in numbers]
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        # Gloo's all-reduce without PyTorch's dispatcher and a new tensor: this happens in the middle of training.
        backend: Any = group._get_backend(torch.device("cpu"))
        self.work = backend.allreduce([buffer], options)

    def agreed(self) -> bool:
        """Return true if all ranks have the same intent; call it once the work is done."""
        largest, smallest = np.split(self._bounds, 2)
        return bool((largest == -smallest).all())

    def aborts(self) -> bool:
        """Return true if all ranks have voted on the same request, and some to abort it; call it likewise.

        Where in the request does not matter, as long as they have begun the same reductions: the places in a forward
        are compared once the ranks have gone along with each other.
        """
        largest, smallest = np.split(self._bounds, 2)
        same_request = bool((largest[1:3] == -smallest[1:3]).all())
        return same_request and -smallest[0] in VOTES and largest[0] == Kind.ABORT


class Channel:
    """A process group of the ranks of ``group``, a data-parallel group. To be built on all of them (collective)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        # Ranks outside the group may know nothing of it, and then cannot take part in making another.
        part = len(ranks) < dist.get_world_size()
        self.timeout = _timeout_of(dist.distributed_c10d._get_default_group())
        """That of the process group that the user has made; a new group gets PyTorch's default instead."""
        self._group: dist.ProcessGroup | None = dist.new_group(
            ranks, timeout=self.timeout + _LATER, backend="gloo", use_local_synchronization=part
        )
        self.rank, self.world_size = dist.get_rank(self._group), len(ranks)
        self.ranks = f"requestzero/ranks/{hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"
        """Name of the ranks, the same for all engines that share them."""
        _engines[self.ranks] += 1
        self.name = f"{self.ranks}/{self._group.group_name}/engine {_engines[self.ranks]}"
        """Name of the engine, the same on all ranks, which build their engines in the same order."""
        self._buffer = torch.zeros(2 * NUMBERS, dtype=torch.int64)
        self._bounds = self._buffer.numpy()
        # A rank that left at once would end connections that another is still making.
        dist.all_reduce(self._buffer, group=self._group)
        self.rounds = 0
        """Comparisons so far; for measuring."""

    @property
    def closed(self) -> bool:
        """True once this rank has left the group."""
        return self._group is None

    def compare(self, intent: Intent) -> Round:
        """Begin to compare, once the round before is done (collective: the n-th calls of all ranks belong together)."""
        assert self._group is not None, "the engine has been destroyed"
        self.rounds += 1
        return Round(intent, self._buffer, self._bounds, self._group)

    def gather(self, value: Any, wait: Callable[[Any], object]) -> list[Any]:
        """Return the values of all ranks, by rank (collective); ``wait`` is called with each collective under way.

        Args:
            value: text, number, ``None`` or a list of such.
            wait: waits for what it is given.
        """
        dumped = json.dumps(value).encode()
        longest = max(map(int, self._gather(torch.tensor([len(dumped)], device="cpu"), wait)))
        padded = torch.frombuffer(bytearray(dumped.ljust(longest)), dtype=torch.uint8)
        return [json.loads(each.numpy().tobytes()) for each in self._gather(padded, wait)]

    def _gather(self, tensor: torch.Tensor, wait: Callable[[Any], object]) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        wait(dist.all_gather(gathered, tensor, group=self._group, async_op=True))
        return gathered

    def close(self) -> None:
        """Leave the group. A round under way would keep its threads waiting."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():  # else it has ended with all groups
            dist.destroy_process_group(group)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long collectives of ``group`` wait for another rank: PyTorch's default where it does not tell."""
    options: Any = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout
