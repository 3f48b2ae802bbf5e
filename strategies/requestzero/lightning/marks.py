"""Where requests and update windows end in the batches that Lightning's loops take."""

from __future__ import annotations

from requestzero.data import boundaries as window_marks
from requestzero.data.boundaries import unwrap

__all__ = ["WindowMarks", "unwrap"]


class WindowMarks(window_marks.WindowMarks):
    """With Lightning's name for the number of requests in a window."""

    option = "accumulate_grad_batches"
    owner = "Trainer"
