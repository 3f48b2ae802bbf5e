"""The overflow policy in a DeepSpeed config: its section, its keys' places, and options that disagree."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from requestzero.config.engine_options import EngineOptions, take_engine_options
from requestzero.config.options import OverflowSettings

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 8}}


@pytest.mark.parametrize("retain", [True, "auto"])
def test_own_keys_are_taken_out_of_a_deepspeed_config(retain: bool | str) -> None:
    config = {
        "zero_optimization": {"stage": 2, "retain_gpu_grad_partition_until_step": retain},
        "overflow": {"check_grad_overflow": True, "on_overflow": "drop_request", "max_consecutive_skips": 3},
    }
    overflow = OverflowSettings(check_grad_overflow=True, on_overflow="drop_request", max_consecutive_skips=3)
    assert take_engine_options(config) == EngineOptions(retain, overflow)
    assert config == {"zero_optimization": {"stage": 2}}
    assert take_engine_options(config) == EngineOptions(overflow=OverflowSettings(False, "skip"))


def test_deepspeeds_own_keys_are_read_and_left() -> None:
    config: dict[str, Any] = {
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8.0, "min_loss_scale": 4, "auto_cast": True},
        "bf16": {"enabled": False, "check_grad_overflow": False},
    }
    before = copy.deepcopy(config)
    wanted = OverflowSettings(True, "skip", loss_scale=0, initial_scale_power=8, min_loss_scale=4)
    assert take_engine_options(config).overflow == wanted
    assert config == before
    assert take_engine_options({"bf16": {"enabled": True, "check_grad_overflow": False}}).overflow == OverflowSettings(
        False, "skip"
    )


def test_a_section_that_is_off_says_nothing() -> None:
    """As in a config for several precisions, which DeepSpeed takes."""
    config = {"fp16": {"enabled": False, "loss_scale": 8, "hysteresis": 2}, "bf16": {"enabled": True}}
    assert take_engine_options(config).overflow == OverflowSettings(True, "skip")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"overflow": "skip"},
            r"^overflow='skip' in the DeepSpeed config is not allowed: give a mapping of its options",
        ),
        (
            {"overflow": {"on_overflw": "skip"}},
            r"^overflow\.on_overflw in the DeepSpeed config is no overflow option: use one of on_overflow, "
            r"max_consecutive_skips, check_grad_overflow\. Did you mean 'on_overflow'\?$",
        ),
        ({"overflow": {"loss_scale": 2}}, r"^overflow\.loss_scale in .* has its own place .*: use fp16\.loss_scale\.$"),
        (
            {**BF16, "overflow": {"check_grad_overflow": True}},
            r"is for fp32; the precision is bf16: use bf16\.check_grad_overflow\.$",
        ),
        (
            {"bf16": {"check_grad_overflow": True}},
            r"is for bf16; the precision is fp32: use overflow\.check_grad_overf",
        ),
        (
            {**FP16, "bf16": {"check_grad_overflow": True}},
            r"^bf16\.check_grad_overflow in a DeepSpeed config is for bf16; the precision is fp16, which always checks",
        ),
        ({**BF16, "fp16": {"loss_scale": 8}}, r"^overflow\.loss_scale=8 \(fp16\.loss_scale\) scales fp16 losses, but"),
        ({"fp16": {"enabled": True, "hysteresis": "two"}}, r"^overflow\.hysteresis='two' is not allowed: use a whole"),
        ({**FP16, "overflow": {"check_grad_overflow": True}}, r"the precision is fp16, which always checks: leave it"),
        (
            {**BF16, "overflow": {"on_overflow": "stop"}},
            r"^In .*: overflow\.on_overflow='stop' is not allowed: use one of",
        ),
        (
            {"overflow": {"on_overflow": "raise"}},
            r"^overflow\.on_overflow='raise' needs overflow\.check_grad_overflow=true, which is off by default in fp32",
        ),
        (
            {"bf16": {"enabled": True, "check_grad_overflow": False}, "overflow": {"max_consecutive_skips": 2}},
            r"^overflow\.max_consecutive_skips=2 and overflow\.check_grad_overflow=False \(bf16\.check.*\) disagree",
        ),
        (
            {"fp16": {"enabled": True}, "overflow": {"on_overflow": "drop_request"}},
            r"^overflow\.on_overflow='drop_request' and a dynamic loss scale \(fp16\.loss_scale=0, .*\) disagree",
        ),
        (
            {**BF16, "managed_gradient_accumulation": False, "overflow": {"on_overflow": "drop_request"}},
            r"^overflow\.on_overflow='drop_request' and managed_gradient_accumulation=false disagree",
        ),
    ],
)
def test_what_cannot_work_is_an_error(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take_engine_options(config)
