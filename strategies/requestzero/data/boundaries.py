"""Ends of requests and update windows in the batches of a training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from requestzero.data.micro_batch import MicroBatch


class WindowMarks:
    """Position of the current batch in its request and its window, as the loader marks it.

    A plain batch is a request of one micro-batch. Without marks from the loader, a window is as many requests as the
    training loop's option says. This knows what *should* happen; whether gradients are pending is known to the
    engine's ``update_window`` alone.

    Args:
        option: Name of the loop's option for the number of requests in a window; for messages.
        owner: What has the option, such as ``Trainer``; for messages.
    """

    def __init__(self, option: str = "requests_per_update", owner: str = "micro_batches") -> None:
        self._option, self._owner = option, owner
        self.starts_window = False
        """True if the current batch is the first of its window."""
        self.request_end = True
        """True if the current batch is the last of its request."""
        self.window_end = True
        """True if the optimizer steps after the current batch, and before the first one."""
        self.weight: Any = None
        """Weight of the current micro-batch, if the loader gives one: a number, or a tensor that holds one."""
        self.starts_request = False
        """True if the current batch is the first of its request."""
        self.request_id: str | int | None = None
        """Name of the current request, if the loader gives one."""
        self.micro_batches: int | None = None
        """Micro-batches of the current request; ``None`` if its first does not tell."""
        self.window_ends_with_request: bool | None = None
        """True if the optimizer steps after the current request; ``None`` if its first micro-batch does not tell."""
        self.loader_marks_windows: bool | None = None
        """True if the loader marks window ends itself; ``None`` before an epoch's first batch."""
        self._requests = 0
        self._between_windows = True

    def take(self, batch: Any, requests_per_update: int) -> Any:
        """Note the marks of the next batch and return its inputs.

        Raises:
            ValueError: ``window_end`` is set on some micro-batches only, or although ``requests_per_update``
                is not 1.
        """
        micro_batch = batch if isinstance(batch, MicroBatch) else MicroBatch(_check_plain(batch))
        self._check_marks(micro_batch, requests_per_update)
        self.starts_window = self._between_windows
        self.starts_request = self.starts_window or self.request_end
        self._requests = (0 if self.starts_window else self._requests) + micro_batch.request_end
        self.request_end = micro_batch.request_end
        self.request_id = micro_batch.request_id
        self.weight = micro_batch.weight
        if micro_batch.window_end is None:
            self.window_end = self.request_end and self._requests >= requests_per_update
        else:
            self.window_end = micro_batch.window_end
        self._between_windows = self.window_end
        if self.starts_request:
            self._look_ahead(micro_batch, requests_per_update)
        return micro_batch.inputs

    def _look_ahead(self, first: MicroBatch, requests_per_update: int) -> None:
        """Note what the first micro-batch of a request says of the whole of it."""
        self.micro_batches = 1 if first.request_end else first.micro_batches
        if first.request_end:
            self.window_ends_with_request = self.window_end
        else:
            counted = first.window_end is None
            self.window_ends_with_request = self._requests + 1 >= requests_per_update if counted else None

    @property
    def requests(self) -> int:
        """Requests of the window at hand that have ended."""
        return self._requests

    def resume(self, requests: int) -> None:
        """Let the next batch go on in a window of which so many requests have ended."""
        self._requests, self._between_windows = requests, False
        self.request_end, self.window_end = True, False

    def skip(self) -> None:
        """Note a batch that Lightning leaves out (the loader gave ``None``): it starts and ends nothing."""
        self.starts_window = self.starts_request = self.window_end = False
        self.weight = None

    def end_epoch(self) -> None:
        """Let the next batch start a window, whatever came before."""
        self.window_end = self.request_end = self._between_windows = True
        self.loader_marks_windows = None

    def _check_marks(self, micro_batch: MicroBatch, requests_per_update: int) -> None:
        marks = micro_batch.window_end is not None
        if self.loader_marks_windows is None:
            self.loader_marks_windows = marks
        if marks != self.loader_marks_windows:
            raise ValueError(
                f"The micro-batch of request {micro_batch.request_id!r} has "
                f"window_end={micro_batch.window_end!r}, unlike the ones before it: a loader sets window_end "
                "to true or false on all of its micro-batches, or leaves it None on all of them."
            )
        if marks and requests_per_update != 1:
            raise ValueError(
                "The loader marks the ends of update windows itself (window_end of request "
                f"{micro_batch.request_id!r} is {micro_batch.window_end!r}), but "
                f"{self._owner}({self._option}={requests_per_update}) asks to count requests: leave "
                f"{self._option} at 1, or leave window_end at None in the loader."
            )


def unwrap(batch: Any) -> Any:
    """Return a batch as the model gets it; for evaluation loops, where the marks mean nothing."""
    return batch.inputs if isinstance(batch, MicroBatch) else _check_plain(batch)


def _check_plain(batch: Any) -> Any:
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    if any(isinstance(item, MicroBatch) for item in items):
        raise ValueError(
            f"The batch is a {type(batch).__name__} that holds a MicroBatch: the MicroBatch has to be the "
            "batch itself, with everything else in its inputs. Combine the loaders before their batches are "
            "marked."
        )
    return batch
