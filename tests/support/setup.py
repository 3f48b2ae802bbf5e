"""One configuration of the grid: that of the doctor's self-test."""

from requestzero.doctor.verify.setup import KEEP_OPTIMIZER, Setup

AT_REQUEST_ENDS = {1: "request", 2: None}
"""``reduce_gradients_at``, by stage, where the sum is complete at every request's end."""

__all__ = ["AT_REQUEST_ENDS", "KEEP_OPTIMIZER", "Setup"]
