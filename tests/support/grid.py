"""The configurations that most tests of ZeRO run in, as parameters of a test."""

from __future__ import annotations

import pytest

from requestzero.doctor.verify.configurations import PLACES, SUMS

FP16_SUMS = [("fp16", "fp16"), ("fp16", "fp32")]

every_place = pytest.mark.parametrize(("stage", "offload"), PLACES)
every_stage = pytest.mark.parametrize(("stage", "offload"), [*PLACES, (3, False), (3, True)])
every_sum = pytest.mark.parametrize(("model", "accum"), SUMS)
