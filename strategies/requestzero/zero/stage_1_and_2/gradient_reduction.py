"""The way of gradients from their hooks through a bucket and its collective into the window's sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from requestzero.zero.common.ranks import Ranks
from requestzero.zero.common.reduction_schedule import ReductionSchedule
from requestzero.zero.common.streams import current_stream, has_streams, keep_alive
from requestzero.zero.stage_1_and_2.bucket import Bucket, Contents
from requestzero.zero.stage_1_and_2.bucket_collective import BucketCollective, Reduced
from requestzero.zero.stage_1_and_2.layout import Parameter, PartitionLayout
from requestzero.zero.stage_1_and_2.local_gradients import LocalGradients
from requestzero.zero.stage_1_and_2.scatter_plan import Part


class Route(NamedTuple):
    """The buckets of gradients that are reduced at one time of a window, and the dtype each is reduced in."""

    buckets: Mapping[torch.dtype, Bucket]
    """By dtype of the reduction."""
    comm_dtype: Callable[[Parameter], torch.dtype]
    """Gives a parameter's."""


Observer = Callable[[int, Parameter, torch.Tensor], None]
"""Sees a gradient that goes into a bucket, and may change it in place: parameter id, parameter, gradient."""

Accumulate = Callable[[Reduced, torch.dtype, bool], None]
"""Adds reduced gradients to the window's sum: with the bucket's dtype, and whether the request ends."""


class GradientReduction:
    """Reduces the gradients of one engine.

    Args:
        layout: of the parameters.
        local: where gradients wait before they are reduced.
        arriving: for gradients as backwards bring them; ``None`` where they never go from there.
        waiting: for the sums that :class:`LocalGradients` keeps; likewise.
        reduction: the collective.
        accumulate: where reduced gradients go.
        schedule: when to reduce.
        ranks: the data-parallel ranks.
        request_ends: tells whether the backward at hand is the last of its request.
        before_first: called before the first gradient of a backward, or of what has waited, goes into a bucket.
    """

    def __init__(
        self,
        layout: PartitionLayout,
        local: LocalGradients,
        arriving: Route | None,
        waiting: Route | None,
        reduction: BucketCollective,
        accumulate: Accumulate,
        schedule: ReductionSchedule,
        ranks: Ranks,
        request_ends: Callable[[], bool],
        before_first: Callable[[], None],
    ) -> None:
        self._layout, self._local = layout, local
        self._arriving, self._waiting = arriving, waiting
        self._reduction, self._accumulate = reduction, accumulate
        self._schedule, self._ranks = schedule, ranks
        self._request_ends, self._before_first = request_ends, before_first
        self.observers: list[Observer] = []
        """Called with every gradient that goes into a bucket."""
        self._begun = False
        self._stream: Any = get_accelerator().Stream() if schedule.overlaps and has_streams() else None

    @property
    def has_begun(self) -> bool:
        """True from the first gradient that goes into a bucket until all of them are reduced."""
        return self._begun

    # --- events of a backward ---------------------------------------------------------------------------------------

    def send(self, param: Parameter) -> None:
        """Put the gradient of a parameter, if it has one, into its bucket, which is reduced before if it is full.

        Collective where it is.
        """
        if not self._local.waits(param):
            return
        gradient, numel = self._local.take(param), param.numel()
        if numel == 0:
            return
        self._begin()
        param_id, bucket = self._layout.id_of(param), self._route.buckets[self._route.comm_dtype(param)]
        for observe in self.observers:
            observe(param_id, param, gradient)
        if not bucket.has_room_for(numel):
            self._reduce_bucket(bucket, following=param_id)
        if numel > bucket.capacity:
            self._reduce_alone(param_id, gradient, bucket)
        else:
            bucket.add(param_id, self._layout.group_of[param_id], gradient)

    @property
    def _route(self) -> Route:
        route = self._arriving if self._schedule.in_every_backward else self._waiting
        assert route is not None
        return route

    def end_backward(self) -> None:
        """Reduce what the buckets hold at the end of a backward, where every backward reduces. Collective."""
        if self._schedule.fills_absent:
            self._send_all()
        self._finish()

    def reduce_local(self) -> None:
        """Reduce everything that waits on parameters or in buckets. Collective."""
        self._send_all()
        self._finish()

    def abandon(self) -> None:
        """Drop what an interrupted backward has left, here and on the parameters."""
        if self._begun:
            # What is under way on another stream must not meet memory that is used anew.
            get_accelerator().synchronize()
        for param in self._layout.params:
            self._local.clear(param)
        self._release()

    # --- on the way -------------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        self._begin()
        for param in self._layout.evenly:
            if self._schedule.fills_absent and self._local.is_absent(param):
                self._local.put_zeros(param, next(iter(self._route.buckets.values())).dtype)
            self.send(param)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._before_first()

    def _reduce_bucket(self, bucket: Bucket, following: int | None = None) -> None:
        """Reduce a bucket, unless it is empty; ``following`` is the parameter that has found no room in it."""
        if not bucket.param_ids:
            return
        self._ranks.agreement.before_reduction(bucket.param_ids, following)
        stream = self._stream or current_stream()
        with get_accelerator().stream(stream):
            self._reduce(bucket.contents(stream), bucket.comm_dtype)
            bucket.clear(stream)

    def _reduce_alone(self, param_id: int, gradient: torch.Tensor, bucket: Bucket) -> None:
        """Reduce a gradient that is larger than a bucket by itself."""
        self._ranks.agreement.before_reduction((param_id,), None)
        producer = current_stream()
        stream = self._stream or producer
        if stream != producer:
            stream.wait_stream(producer)
        with get_accelerator().stream(stream):
            # A copy: autograd hands out gradients that share memory, and this one is changed in place.
            flat = gradient.detach().to(bucket.dtype, copy=True, memory_format=torch.contiguous_format).view(-1)
            keep_alive(gradient, stream)
            part = Part(param_id, self._layout.group_of[param_id], 0, 0, flat.numel())
            self._reduce(Contents(flat, [part]), bucket.comm_dtype)

    @torch.no_grad()  # a backward with create_graph=True runs its hooks with gradients enabled
    def _reduce(self, contents: Contents, comm_dtype: torch.dtype) -> None:
        for reduced in self._reduction.reduce(contents.flat, contents.parts, comm_dtype):
            self._accumulate(reduced, contents.flat.dtype, self._request_ends())

    def _finish(self) -> None:
        for bucket in self._route.buckets.values():
            self._reduce_bucket(bucket)
        if self._stream is not None:
            get_accelerator().current_stream().wait_stream(self._stream)
        self._release()
        self._ranks.agreement.end_reduction()

    def _release(self) -> None:
        for route in (self._arriving, self._waiting):
            for bucket in route.buckets.values() if route else ():
                bucket.release()
        self._begun = False
