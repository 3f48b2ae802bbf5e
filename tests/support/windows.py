"""Update windows of the exact layers, and how a rank runs them: those of the probe and of the doctor's self-test."""

from __future__ import annotations

from requestzero.doctor.verify.training import Layers, backward, inputs_of  # noqa: F401 (tests import them from here)
from requestzero.probe.windows import (  # noqa: F401 (likewise)
    IN,
    LR,
    OUTS,
    ExactLayers,
    Micro,
    Window,
    reference,
    values,
    wrong_updates,
)

ALL = (True,) * len(OUTS)
"""A micro-batch that uses every layer."""
