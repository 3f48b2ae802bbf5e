"""Passes over a loader of micro-batches, with the ends of requests and windows noted for the Accelerator."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.utils import send_to_device

from requestzero.accelerate.engine_access import engine_wrapper_of
from requestzero.data.boundaries import WindowMarks
from requestzero.former_names import renamed_argument

if TYPE_CHECKING:
    from requestzero.accelerate.engine import RequestZeROEngineWrapper


class MicroBatches:
    """Passes over a loader of :class:`~requestzero.MicroBatch` (or of plain batches, each one request).

    Yields the inputs, moved to ``accelerator.device``. ``accelerator.sync_gradients`` is true at the last micro-batch
    of a window, so that ``optimizer.step()``, ``scheduler.step()`` and ``optimizer.zero_grad()`` in the loop act there
    only. The last window of a pass ends with the pass, however many requests it has.

    For resuming, give this object, and not the loader itself, to ``accelerator.register_for_checkpointing``: one
    micro-batch is fetched ahead, and :meth:`state_dict` leaves it out.

    Args:
        accelerator: the one that trains.
        loader: an iterable of micro-batches, not prepared by Accelerate, which deals neighbouring ones out to different
            ranks.
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
        self._requests = 0
        """Of the open window, that have ended."""
        self._resumes = False
        """A state was loaded: the next pass may begin inside its window."""

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Call the loader's ``set_epoch``."""
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield the inputs of one pass. Collective at every request, where ranks agree.

        Raises:
            RuntimeError: a window is open, another pass goes on, or the loader itself is registered for checkpointing.
            RankDisagreementError: another rank has more batches or fewer, or its loader has raised.
            ValueError: the loader's marks contradict each other or ``requests_per_update``.
        """
        wrapper = engine_wrapper_of(self.accelerator)
        self._check_start(wrapper)
        per_window = self.requests_per_update or self.accelerator.gradient_accumulation_steps
        marks, gradient_state = self._marks(), self.accelerator.gradient_state
        with wrapper.marking(), wrapper.engine.data_pass():
            try:
                for batch, state, is_last in _with_last(self.loader, self._snapshot):
                    self._state = state
                    inputs = marks.take(batch, per_window)
                    self._requests = 0 if marks.window_end or is_last else marks.requests
                    if is_last and not marks.request_end:
                        warnings.warn(
                            f"The loader ended inside request {marks.request_id!r}: its micro-batches so far go into "
                            "the update.",
                            stacklevel=2,
                        )
                    wrapper.request_end = marks.request_end or is_last
                    wrapper.micro_batch_weight = marks.weight
                    wrapper.window_end = marks.window_end or is_last
                    gradient_state._set_sync_gradients(wrapper.window_end)
                    if marks.starts_request and not wrapper.engine.update_window.request_open:
                        window_end = True if is_last else marks.window_ends_with_request
                        wrapper.engine.begin_request(
                            marks.request_id, micro_batches=marks.micro_batches, window_end=window_end
                        )
                    yield send_to_device(inputs, self.accelerator.device)
            finally:
                gradient_state._set_sync_gradients(True)
                self._state = None

    def _marks(self) -> WindowMarks:
        """Return the marks of the next pass, which may begin inside a window that was loaded."""
        marks = WindowMarks()
        if self._resumes and engine_wrapper_of(self.accelerator).engine.update_window.is_open:
            marks.resume(self._requests)
        self._resumes = False
        return marks

    def _check_start(self, wrapper: RequestZeROEngineWrapper) -> None:
        window = wrapper.engine.update_window
        if window.is_open and not self._resumes:
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
        """Return the loader's state after the micro-batch that was yielded last.

        Raises:
            TypeError: the loader has no ``state_dict``.
        """
        if not hasattr(self.loader, "state_dict"):
            raise TypeError(
                f"{type(self.loader).__name__} has no state_dict(), so its place cannot be saved: use RequestLoader or "
                "another loader that has one, or do not register it for checkpointing."
            )
        return {"loader": self._snapshot() if self._state is None else self._state, "requests": self._requests}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass continue where ``state_dict`` was saved."""
        self.loader.load_state_dict(state_dict["loader"])
        self._state, self._requests, self._resumes = None, state_dict.get("requests", 0), True


def _with_last(loader: Any, snapshot: Any) -> Iterator[tuple[Any, Any, bool]]:
    """Yield ``(batch, the loader's state after it, True for the last)``; one batch is fetched ahead."""
    iterator = iter(loader)
    waiting: list[tuple[Any, Any]] = []
    for batch in iterator:
        if waiting:
            yield (*waiting.pop(), False)
        waiting.append((batch, snapshot()))
    if waiting:
        yield (*waiting.pop(), True)
