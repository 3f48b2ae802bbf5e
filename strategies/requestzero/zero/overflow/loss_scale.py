"""The adjustment of DeepSpeed's loss scale after an overflow, without its log lines and its bare exception."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deepspeed.utils import logger as deepspeed_logger

_AT_MINIMUM = "Current loss scale already at minimum"


def reduce_scale(update: Callable[[], None]) -> bool:
    """Call ``update``, DeepSpeed 0.19.8's adjustment after an overflow; return whether the scale was at its minimum.

    DeepSpeed raises there in the middle of a step. The engine raises instead once the step has ended on all ranks, and
    logs more about a skipped update than the lines that are left out here.
    """
    try:
        with _without_overflow_lines():
            update()
    except Exception as error:
        if _AT_MINIMUM not in str(error):
            raise
        return True
    return False


@contextmanager
def _without_overflow_lines() -> Iterator[None]:
    def other(record: logging.LogRecord) -> bool:
        return "OVERFLOW!" not in record.getMessage()

    deepspeed_logger.addFilter(other)
    try:
        yield
    finally:
        deepspeed_logger.removeFilter(other)
