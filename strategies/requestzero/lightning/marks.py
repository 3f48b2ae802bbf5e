"""Where requests and update windows end in the batches that Lightning's loops take."""

from __future__ import annotations

from requestzero import window_marks
from requestzero.window_marks import unwrap

__all__ = ["WindowMarks", "unwrap"]


class WindowMarks(window_marks.WindowMarks):
    """With Lightning's name for the number of requests in a window."""

    option = "accumulate_grad_batches"
    owner = "Trainer"
