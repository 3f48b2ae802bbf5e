"""A reduction bucket: gradients gathered in one flat tensor, to be reduced by one collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from requestzero.zero.common.streams import current_stream, has_streams, keep_alive, record_event
from requestzero.zero.stage_1_and_2.layout import Share
from requestzero.zero.stage_1_and_2.scatter_plan import Part


class Contents(NamedTuple):
    """What a bucket holds."""

    flat: torch.Tensor
    """The gathered gradients, in the bucket's dtype."""
    parts: list[Part]
    """Where each of them lies."""


class Bucket:
    """Gradients of one communication dtype.

    Where reduction begins when all gradients are there (stage 1 without ``overlap_comm``) they are gathered by one
    concatenation, in the order of their owners, into memory of just their size. Otherwise each is copied when it comes,
    so that its own memory is free again; with ``overlap_comm`` into two buffers in turn, of which one is filled while
    the other is reduced. A backward brings the last parameters first: a buffer is filled from its end, so that it has
    the order of the partitions in the end.

    Args:
        comm_dtype: dtype of the reduction.
        dtype: dtype of the bucket.
        capacity: most elements of a reduction. A gradient that is larger is reduced by itself.
        buffers: 0 to concatenate, 1 or 2 to copy on arrival.
        total: elements of all parameters, at which a buffer need be no larger.
        shares: all ranks' parts of each parameter, by parameter id; one rank owns what is not among them.
    """

    def __init__(
        self,
        comm_dtype: torch.dtype,
        dtype: torch.dtype,
        capacity: int,
        buffers: int,
        total: int,
        shares: Mapping[int, Sequence[Share]] | None = None,
    ) -> None:
        self.comm_dtype, self.dtype, self.capacity = comm_dtype, dtype, capacity
        self.elements = 0
        self._shares = shares or {}
        self._parts: list[Part] = []  # their starts count from the end of the buffer, or are not known yet
        self._pending: list[torch.Tensor] = []
        self._buffer_count, self._buffer_numel = buffers, min(capacity, total)
        self._buffers: list[torch.Tensor] = []
        self._index = 0
        self._start_of: dict[int, int] = {}
        # Streams that have filled the current buffer, and the event behind what has used each buffer last.
        self._producers: set[Any] = set()
        self._used: dict[int, tuple[Any, Any]] = {}

    @property
    def param_ids(self) -> tuple[int, ...]:
        """Parameters whose gradients are in the bucket, in the order in which they have come."""
        return tuple(part.param_id for part in self._parts)

    def has_room_for(self, numel: int) -> bool:
        """Return whether a gradient fits in beside what is there."""
        return self.elements + numel <= self.capacity

    def add(self, param_id: int, group_idx: int, gradient: torch.Tensor) -> None:
        """Put a gradient into the bucket. Its memory may be reused at once, unless the bucket concatenates."""
        flat = gradient.detach().reshape(-1) if gradient.requires_grad else gradient.reshape(-1)
        if self._buffer_count and self._copy(param_id, flat):
            return
        if not self._buffer_count:
            self._pending.append(flat)
        self.elements += flat.numel()
        self._parts.append(Part(param_id, group_idx, 0, -self.elements, flat.numel()))

    def _copy(self, param_id: int, flat: torch.Tensor) -> bool:
        """Copy a gradient into the buffer; return whether it was added to one of the same parameter.

        Reentrant checkpointing brings the gradient of a parameter that two segments use in two parts.
        """
        if not self._buffers:
            self._allocate(flat.device)
        keep_alive(flat, current_stream())  # it may have been made on another stream, such as the forward's
        self._order_behind_last_use()
        buffer, start = self._buffers[self._index], self._start_of.get(param_id)
        if start is not None:
            buffer.narrow(0, start, flat.numel()).add_(flat)
            return True
        start = self._start_of[param_id] = self._buffer_numel - self.elements - flat.numel()
        buffer.narrow(0, start, flat.numel()).copy_(flat)
        return False

    def _allocate(self, device: torch.device) -> None:
        self._buffers = [
            torch.empty(self._buffer_numel, dtype=self.dtype, device=device) for _ in range(self._buffer_count)
        ]
        # What is queued on this stream may still use the memory; other streams do not know of it.
        self._used = dict.fromkeys(range(self._buffer_count), (current_stream(), record_event()))

    def _order_behind_last_use(self) -> None:
        """Let the current stream fill the buffer only after its last reduction, and be waited for by the next."""
        if not has_streams():
            return
        stream = current_stream()
        self._producers.add(stream)
        using, event = self._used[self._index]
        if using != stream:
            stream.wait_event(event)

    def contents(self, stream: Any) -> Contents:
        """Return what the bucket holds, for use on ``stream``, the current one."""
        for producer in self._producers - {stream}:
            stream.wait_stream(producer)
        if not self._buffer_count:
            return self._concatenated(stream)
        buffer = self._buffers[self._index]
        keep_alive(buffer, stream)
        parts = [part._replace(start=part.start + self.elements) for part in self._parts]
        return Contents(buffer.narrow(0, self._buffer_numel - self.elements, self.elements), parts)

    def _concatenated(self, stream: Any) -> Contents:
        owned: list[tuple[int, Part, torch.Tensor]] = []
        for part, gradient in zip(self._parts, self._pending, strict=True):
            keep_alive(gradient, stream)
            shares = self._shares.get(part.param_id, [Share(0, 0, part.numel)])
            cuts = [gradient] if len(shares) == 1 else gradient.split([share.numel for share in shares])
            for share, cut in zip(shares, cuts, strict=True):
                owned.append((share.rank, part._replace(first=share.start, numel=share.numel), cut))
        owned.sort(key=lambda each: (each[0], each[1].group_idx))
        start, parts = 0, []
        for _, part, _ in owned:
            parts.append(part._replace(start=start))
            start += part.numel
        # First concatenated, then converted: several times faster than a concatenation that converts.
        return Contents(torch.cat([cut for *_, cut in owned]).to(self.dtype), parts)

    def clear(self, stream: Any) -> None:
        """Empty the bucket, whose contents have been used on ``stream``, the current one."""
        if self._buffer_count:
            self._used[self._index] = stream, record_event()
            self._index = (self._index + 1) % self._buffer_count
        self._drop_contents()

    def release(self) -> None:
        """Drop the contents and the buffers."""
        self._drop_contents()
        self._buffers.clear()
        self._used.clear()
        self._index = 0

    def _drop_contents(self) -> None:
        self._parts.clear()
        self._pending.clear()
        self._start_of.clear()
        self._producers.clear()
        self.elements = 0
