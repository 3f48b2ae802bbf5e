"""What the user can put right: reported as a list of problems, without a traceback."""

from __future__ import annotations


class UsageError(ValueError):
    """One or more problems of the command, its configuration or its data; the message has one a line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class BadLineError(ValueError):
    """A line of a data file is not a usable request; the message says why."""
