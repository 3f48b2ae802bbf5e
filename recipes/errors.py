"""Errors that the user can correct: reported as a list of problems, without a traceback."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


class UsageError(ValueError):
    """One or more problems of the command, its configuration or its data; the message has one a line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class BadLineError(ValueError):
    """A line of a data file that is not a usable request; the message says why."""


def end_run(reason: BaseException) -> NoReturn:
    """Exit with code 1 for an error that all ranks raise; print it on the first rank only."""
    from requestzero.recipes.console import is_first_process

    if is_first_process():
        print("The run was ended:", reason, sep="\n  ", file=sys.stderr, flush=True)
    sys.exit(1)


def end_by_sigterm(updates: int) -> NoReturn:
    """Exit as a shell says of a process that SIGTERM has ended, after ``updates`` updates; call on all ranks.

    Only the first rank has this code: Lightning kills it where a rank that it has started does not end with 0.
    """
    from requestzero.recipes.console import is_first_process

    if not is_first_process():
        sys.exit(0)
    print(f"SIGTERM ended the run after update {updates}.", file=sys.stderr, flush=True)
    sys.exit(128 + signal.SIGTERM)
