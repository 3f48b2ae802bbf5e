"""Errors of this package that a caller may want to catch by type."""

from __future__ import annotations


class GradientOverflowError(RuntimeError):
    """A window's gradient is not finite, and ``overflow`` says that the run ends (raised on all ranks, same text).

    Weights and optimizer state are as before the window, the window is gone, and the update counts as attempted and
    skipped: a caller may catch it and go on.
    """
