"""The line of the user's program that a warning is about."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

_FOLDERS = str(Path(__file__).parents[2]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_PACKAGES = tuple({folder + os.sep for folder in _FOLDERS})
"""Folders of this package, of Python's own modules and of those that are installed."""


def stacklevel_of_user() -> int:
    """Return the ``stacklevel`` by which a warning of the calling function shows the first line outside of packages."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame, level = frame.f_back, level + 1
    return level
