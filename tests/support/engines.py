"""Engines for a :class:`Setup`, and what they hold: those of the doctor's self-test."""

from __future__ import annotations

from requestzero.doctor.verify.training import (  # noqa: F401 (tests import them from here)
    build,
    flat_masters,
    masters,
    masters_and_state,
    module_weights,
)
