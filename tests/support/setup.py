"""One configuration of the grid: that of the doctor's self-test."""

from requestzero.doctor.verify.setup import KEEP_OPTIMIZER, Setup

__all__ = ["KEEP_OPTIMIZER", "Setup"]
