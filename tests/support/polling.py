"""The interval at which ranks look at the reports of the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch


@contextmanager
def polling_every(seconds: float) -> Iterator[None]:
    """Let this rank poll so often while the block runs; its users' interval is a second."""
    from requestzero.rank_check import watch

    with patch.object(watch, "_POLL_INTERVAL", timedelta(seconds=seconds)):
        yield
