"""Requests of several micro-batches, and windows of any number of requests, in a loop with Accelerate."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.utils import send_to_device

from requestzero.data.boundaries import WindowMarks
from requestzero.former_names import renamed_argument

if TYPE_CHECKING:
    from requestzero.accelerate.engine import RequestZeROEngineWrapper
    from requestzero.zero.common.window import UpdateWindow


class Requests:
    """What :meth:`RequestZeROPlugin.requests` gives: the caller says where requests end, and steps when it wants.

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

    All ranks run the same number of backwards, and end requests and step together. With ``normalization="mean"`` the
    step divides by the window's micro-batches per rank; with ``"token"`` by the weights in ``MicroBatch``, or those
    that ``accelerator.backward(loss, weight=...)`` is given.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @property
    def window(self) -> UpdateWindow:
        """What has come since the last step: ``micro_batches``, ``requests``, ``is_open``, ``request_open``."""
        return engine_wrapper(self._accelerator).engine.update_window

    @contextmanager
    def request(self) -> Iterator[None]:
        """The backwards in the block are one request, which ends with the block. Collective at the end.

        Raises:
            RuntimeError: within another request, or before ``prepare``.
            RankDisagreementError: another rank does something else, or an exception has left the block on some rank
                only.
        """
        wrapper = engine_wrapper(self._accelerator)
        with wrapper.marking(), wrapper.engine.failing_together():
            wrapper.engine.begin_request()
            yield
        wrapper.engine.end_request()

    @renamed_argument("requests_per_window", "requests_per_update")
    def micro_batches(self, loader: Any, requests_per_update: int | None = None) -> MicroBatches:
        """The loader's inputs on the device, with request and window ends noted; see :class:`MicroBatches`."""
        return MicroBatches(self._accelerator, loader, requests_per_update)


class MicroBatches:
    """Passes over a loader of :class:`~requestzero.MicroBatch` (or of plain batches, each one request).

    Yields the inputs, moved to ``accelerator.device``. ``accelerator.sync_gradients`` is true at the last micro-batch
    of a window, so that ``optimizer.step()``, ``scheduler.step()`` and ``optimizer.zero_grad()`` in the loop act there
    only. The last window of a pass ends with the pass, however many requests it has.

    For resuming, give this object, and not the loader itself, to ``accelerator.register_for_checkpointing``: one
    micro-batch is fetched ahead, and :meth:`state_dict` leaves it out.

    Args:
        accelerator: the one that trains.
        loader: not prepared by Accelerate, which deals neighbouring micro-batches out to different ranks.
        requests_per_update: by default ``accelerator.gradient_accumulation_steps``; 1 where the loader marks windows.

    Raises:
        ValueError: the loader was prepared.
    """

    @renamed_argument("requests_per_window", "requests_per_update")
    def __init__(self, accelerator: Accelerator, loader: Any, requests_per_update: int | None = None) -> None:
        if isinstance(loader, DataLoaderStateMixin) and accelerator.num_processes > 1:
            raise ValueError(
                "The loader was prepared by Accelerate, which deals neighbouring micro-batches out to different ranks: "
                "give micro_batches() the loader as it was before accelerator.prepare()."
            )
        self.accelerator = accelerator
        self.loader = loader
        self.requests_per_update = requests_per_update
        self._state: Any = None

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Pass on to the loader."""
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """One pass.

        Raises:
            RuntimeError: a window is open, another pass goes on, or the loader itself is registered for checkpointing.
            RankDisagreementError: another rank has more batches or fewer, or its loader has raised.
            ValueError: the loader's marks contradict each other or ``requests_per_update``.
        """
        wrapper = engine_wrapper(self.accelerator)
        self._check_start(wrapper)
        per_window = self.requests_per_update or self.accelerator.gradient_accumulation_steps
        marks, gradient_state = WindowMarks(), self.accelerator.gradient_state
        with wrapper.marking(), wrapper.engine.data_pass():
            try:
                for batch, state, is_last in _with_last(self.loader, self._snapshot):
                    self._state = state
                    inputs = marks.take(batch, per_window)
                    if is_last and not marks.request_end:
                        warnings.warn(
                            f"The loader ended inside request {marks.request_id!r}: its micro-batches so far go into "
                            "the update.",
                            stacklevel=2,
                        )
                    wrapper.request_end = marks.request_end or is_last
                    wrapper.micro_batch_weight = marks.weight
                    gradient_state._set_sync_gradients(marks.window_end or is_last)
                    if marks.starts_request and not wrapper.engine.update_window.request_open:
                        window_end = True if is_last else marks.window_ends_with_request
                        wrapper.engine.begin_request(
                            marks.request_id, micro_batches=marks.micro_batches, window_end=window_end
                        )
                    yield send_to_device(inputs, self.accelerator.device)
            finally:
                gradient_state._set_sync_gradients(True)
                self._state = None

    def _check_start(self, wrapper: RequestZeROEngineWrapper) -> None:
        window = wrapper.engine.update_window
        if window.is_open:
            raise RuntimeError(
                f"An update window is open ({window.micro_batches} micro-batches since the last step) where a pass "
                "over micro_batches(...) begins: call optimizer.step() or optimizer.zero_grad() before it."
            )
        if any(item is self.loader for item in self.accelerator._custom_objects):
            raise RuntimeError(
                "The loader itself is registered for checkpointing, but it is one micro-batch ahead of the loop: "
                "register what micro_batches(...) has given."
            )

    def _snapshot(self) -> Any:
        return self.loader.state_dict() if hasattr(self.loader, "state_dict") else None

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: the loader's state after the micro-batch that was yielded last.

        Raises:
            TypeError: the loader has no ``state_dict``.
        """
        if not hasattr(self.loader, "state_dict"):
            raise TypeError(
                f"{type(self.loader).__name__} has no state_dict(), so its place cannot be saved: use RequestLoader or "
                "another loader that has one, or do not register it for checkpointing."
            )
        return {"loader": self._snapshot() if self._state is None else self._state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass continue where ``state_dict`` was taken."""
        self.loader.load_state_dict(state_dict["loader"])
        self._state = None


def _with_last(loader: Any, snapshot: Any) -> Iterator[tuple[Any, Any, bool]]:
    """``(batch, the loader's state after it, whether it is the last)``."""
    iterator = iter(loader)
    waiting: list[tuple[Any, Any]] = []
    for batch in iterator:
        if waiting:
            yield (*waiting.pop(), False)
        waiting.append((batch, snapshot()))
    if waiting:
        yield (*waiting.pop(), True)


def engine_wrapper(accelerator: Accelerator) -> RequestZeROEngineWrapper:
    wrapper = getattr(accelerator, "engine_wrapper", None)
    if wrapper is None:
        raise RuntimeError(
            "This Accelerator has not prepared a model with a RequestZeROPlugin: call accelerator.prepare(model, "
            "optimizer, ...) before, with that plugin selected."
        )
    return wrapper
