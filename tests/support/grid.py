"""The configurations that most tests of ZeRO run in, as parameters of a test."""

from __future__ import annotations

from itertools import product

import pytest

PLACES: list[tuple[int, bool]] = list(product((1, 2), (False, True)))
"""ZeRO stage, and whether the optimizer is offloaded."""
SUMS = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")]
"""Dtype of the model, and of its accumulated gradient."""
FP16_SUMS = [("fp16", "fp16"), ("fp16", "fp32")]

every_place = pytest.mark.parametrize(("stage", "offload"), PLACES)
every_sum = pytest.mark.parametrize(("model", "accum"), SUMS)
