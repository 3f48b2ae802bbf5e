"""What the frames of an exception hold in memory."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import suppress


def clear_frames(error: BaseException) -> None:
    """Free the local variables of all frames that ``error`` has left, and those that it was raised from or beside.

    The functions that still run keep theirs, and so do generators, which may go on.
    """
    for each in _related(error, set()):
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if not frame.f_code.co_flags & inspect.CO_GENERATOR:
                with suppress(RuntimeError):  # it runs
                    frame.clear()


def _related(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """Go through an error, its cause, its context and the parts of a group, each once."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    for each in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
        yield from _related(each, seen)
