"""Copies to the host gradients, which run while the host goes on."""

from __future__ import annotations

from typing import Any

import torch

from requestzero.zero.common.streams import current_stream, has_streams, keep_alive, record_event


class HostCopies:
    """Queues copies and knows which of them may still run."""

    def __init__(self) -> None:
        self._pending: dict[Any, Any] = {}  # stream -> event behind its last copy

    def to_host(self, source: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        """Queue a copy into ``host``; return its value on the device of ``source``, as the host will hold it."""
        exact = torch.promote_types(source.dtype, host.dtype) == host.dtype
        if source.dtype != host.dtype and not (exact and source.device == host.device):
            # Between devices a converting copy would go through a pageable buffer and wait. A narrowing one rounds, and
            # may overflow: what is checked has to be what the host gets.
            keep_alive(source, current_stream())
            source = source.to(host.dtype)
        host.copy_(source, non_blocking=True)
        if has_streams():
            keep_alive(source, current_stream())
            self._pending[current_stream()] = record_event()
        return source

    def order_before(self, stream: Any) -> None:
        """Let ``stream`` read the host gradients only behind the copies."""
        for event in self._pending.values():
            stream.wait_event(event)

    def wait(self) -> None:
        """Let the host wait until the copies are done.

        A host gradient may be pageable: a copy from it is read by the host before a stream could wait.
        """
        for event in self._pending.values():
            event.synchronize()
        self._pending.clear()
