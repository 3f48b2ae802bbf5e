"""``fabric.no_backward_sync``: the micro-batches of a request that are not its last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch.nn import Module
from typing_extensions import override

from requestzero.zero.engine import RequestZeROEngine


class RequestBoundaries(_BackwardSyncControl):
    """Keeps a request open over the backwards in ``no_backward_sync``; the first one outside ends it.

    Gradients are reduced when ``reduce_gradients_at`` says so, and not when the block ends.
    """

    @override
    @contextmanager
    def no_backward_sync(self, module: Module, enabled: bool) -> Iterator[None]:
        """Keep the request of the backwards in the block open, if ``enabled``."""
        if not enabled or not isinstance(module, RequestZeROEngine):
            yield
            return
        module.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            module.set_gradient_accumulation_boundary(True)
