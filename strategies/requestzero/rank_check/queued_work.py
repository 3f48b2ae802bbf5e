"""Waiting for the accelerator in pieces, so that the wait can be given up."""

from __future__ import annotations

import time
from datetime import timedelta

from deepspeed.accelerator import get_accelerator

# A step waits once, for milliseconds: polling this often costs less than a thousandth of it.
_POLL_INTERVAL = 50e-6


class QueuedWork:
    """Everything that has been queued on the current stream so far, the other ranks' parts of collectives included."""

    def __init__(self) -> None:
        self._event = get_accelerator().Event()
        self._event.record(get_accelerator().current_stream())

    def is_completed(self) -> bool:
        """Return true once the device has finished it."""
        return bool(self._event.query())

    def wait(self, timeout: timedelta) -> None:
        """Block until the device has finished it.

        Raises:
            RuntimeError: it takes longer than ``timeout``.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("The device is still at work.")
            time.sleep(_POLL_INTERVAL)
