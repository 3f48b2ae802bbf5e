"""Messages that a logger gets."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged_by(name: str, level: int = logging.WARNING) -> Iterator[list[str]]:
    """The messages of this level and above that the logger gets while the block runs."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, listener = logging.getLogger(name), Listener(level)
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(listener)
    try:
        yield messages
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before)
