"""Requests of several micro-batches, and windows of any number of requests, in a loop with Accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from requestzero.accelerate.engine_access import engine_wrapper_of
from requestzero.accelerate.micro_batches import MicroBatches
from requestzero.data.micro_batch import RequestId
from requestzero.former_names import renamed_argument

if TYPE_CHECKING:
    from requestzero.zero.common.window import UpdateWindow


class Requests:
    """Requests and windows for a loop that says itself where requests end, and steps when it wants.

    From :meth:`~requestzero.RequestZeROPlugin.requests`.

    Either with blocks::

        with requests.request():
            for inputs in micro_batches_of_the_request:
                accelerator.backward(loss_of(model(inputs)))
        if the_window_is_complete:
            optimizer.step(); scheduler.step(); optimizer.zero_grad()

    or with a loader that yields :class:`~requestzero.MicroBatch`::

        for inputs in requests.micro_batches(loader):
            accelerator.backward(loss_of(model(inputs)))
            optimizer.step(); scheduler.step(); optimizer.zero_grad()   # act at the window's end

    All ranks run the same number of backwards, and end requests and step together. By default
    (``normalization="mean"``) the step divides by the window's micro-batches per rank; with ``"token"`` by the weights
    in ``MicroBatch``, or those that ``accelerator.backward(loss, weight=...)`` is given.

    Args:
        accelerator: one that has a ``RequestZeROPlugin``.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @property
    def window(self) -> UpdateWindow:
        """Counts since the last step: ``micro_batches``, ``requests``, ``is_open``, ``request_open``."""
        return engine_wrapper_of(self._accelerator).engine.update_window

    @contextmanager
    def request(self, request_id: RequestId = None, *, once: bool = False) -> Iterator[None]:
        """Make the backwards in the block one request, which ends with the block. Collective.

        :class:`~requestzero.AbortRequest` aborts the request and does not leave the block; any other exception aborts
        it where that is possible, and is raised again (see the engine's ``request``).

        Args:
            request_id: name of the request in messages and logs.
            once: refuse a name that is in the window, or that was applied.

        Raises:
            RuntimeError: within another request, or before ``prepare``; or ``AbortRequest`` was raised and the request
                cannot be aborted.
            DuplicateRequestError: ``once``, and the request has come before.
            RankDisagreementError: another rank does something else, or an exception has left the block on some rank
                only.
        """
        wrapper = engine_wrapper_of(self._accelerator)
        with wrapper.marking(), wrapper.engine.request(request_id, once=once):
            yield

    @renamed_argument("requests_per_window", "requests_per_update")
    def micro_batches(self, loader: Any, requests_per_update: int | None = None) -> MicroBatches:
        """Return passes over ``loader`` that note where requests and windows end; see :class:`MicroBatches`."""
        return MicroBatches(self._accelerator, loader, requests_per_update)
