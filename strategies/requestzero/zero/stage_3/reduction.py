"""DeepSpeed's reduction of buckets: when it begins, and what the ranks have to know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero import stage3

from requestzero.zero.common.ranks import Ranks
from requestzero.zero.patch import patched
from requestzero.zero.stage_3.layout import ShardLayout

Observer = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Sees a gradient that goes into a bucket: parameter id, parameter, gradient."""


class BucketReduction:
    """The reduction of one engine; its collectives and buckets are DeepSpeed's.

    Args:
        layout: of the parameters.
        buckets: DeepSpeed's, by communication dtype.
        ranks: the data-parallel ranks.
        before_first: called before the first gradient of a backward goes into a bucket.
    """

    def __init__(
        self,
        layout: ShardLayout,
        buckets: Mapping[torch.dtype, Any],
        ranks: Ranks,
        before_first: Callable[[], None],
    ) -> None:
        self._layout, self._buckets, self._ranks, self._before_first = layout, buckets, ranks, before_first
        self.observers: list[Observer] = []
        """Called with every gradient that goes into a bucket."""
        self.has_begun = False
        """True from the first gradient that goes into a bucket until all of them are reduced."""
        self._ending = False

    def gradient_arrived(self, param: Any, bucket: Any) -> bool:
        """Prepare for a gradient that autograd has brought; return whether it has to be put into its bucket.

        A parameter that a backward uses in two reentrant segments comes twice. The second time autograd has added to it
        where it lies, which is in the bucket.
        """
        if any(each is param for each in bucket.params):
            return False
        if not self.has_begun:
            self.has_begun = True
            self._before_first()
        if param.grad is not None:
            for observe in self.observers:
                observe(self._layout.id_of(param), param, param.grad)
        return True

    @contextmanager
    def reducing(self, bucket: Any) -> Iterator[None]:
        """Around DeepSpeed's reduction of a bucket: the ranks have agreed on it, and wait for it under watch."""
        agreement = self._ranks.agreement
        agreement.before_reduction(tuple(sorted(map(self._layout.id_of, bucket.params))), None)
        if not agreement.active:
            yield
            return
        comm: Any = self._ranks.comm
        with patched(stage3, "dist", comm), patched(coalesced_collectives, "dist", comm):
            yield

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Around the end of a backward, at which DeepSpeed reduces what is left in the buckets and waits for it."""
        self._ending = True
        try:
            yield
        finally:
            self._ending = False
        self.has_begun = False
        self._ranks.agreement.end_reduction()

    def bucket_reduced(self, device: torch.device) -> None:
        """Wait for a backward's last reductions here, under watch: DeepSpeed waits next, without end."""
        if self._ending:
            self._ranks.agreement.wait_for_device(device)

    def abandon(self) -> None:
        """Drop what an interrupted backward has left, here and on the parameters."""
        if self.has_begun:
            get_accelerator().synchronize()  # what is under way on another stream must not meet memory that is reused
        for bucket in self._buckets.values():
            bucket.clear_params()
        for param in self._layout.params:
            param.grad = None
        self.has_begun = False


def owned_parts(
    layout: ShardLayout, params: Sequence[Any], partitions: Sequence[torch.Tensor]
) -> tuple[list[int], list[torch.Tensor]]:
    """Return ids and partitions of the parameters of which this rank owns more than padding."""
    pairs = [(layout.id_of(param), partition) for param, partition in zip(params, partitions, strict=True)]
    owned = [pair for pair in pairs if layout.shards[pair[0]].owned]
    return [param_id for param_id, _ in owned], [partition for _, partition in owned]
