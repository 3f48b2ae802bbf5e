"""The exit statuses of the doctor."""

from enum import IntEnum


class Status(IntEnum):
    """Exit statuses. 1 and 2 are left to Python (an exception) and argparse (wrong arguments)."""

    FINE = 0
    LOSES = 3
    UNFIT = 4
    WRONG = 5
