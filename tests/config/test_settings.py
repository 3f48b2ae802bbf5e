"""Defaults, and every error, of the options that all front ends share."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict
from typing import Any

import pytest

from requestzero.config.options import OverflowSettings, RequestZeROSettings
from requestzero.config.translation import to_config

STAGES = r"use one of 1, 2, 3\."
BOOLS = r"use true or false\."
RETAINS = r"use true, false or 'auto'\."


def test_defaults() -> None:
    overflow = dict.fromkeys(asdict(OverflowSettings()))
    assert asdict(RequestZeROSettings()) == {
        "stage": 2,
        "offload_optimizer": False,
        "offload_parameters": False,
        "retain_gpu_grad_partition_until_step": False,
        "grad_accum_dtype": None,
        "normalization": "mean",
        "incomplete_window": "step",
        "log_metrics": True,
        "reduce_gradients_at": None,
        "abort": False,
        "rank_agreement": True,
        "rank_dependent_micro_batches": False,
        "rank_dependent_parameters": False,
        "gradients_in_hooks": True,
        "compare_weights": True,
        "overflow": overflow,
    }


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("stage", (1, 2)),
        ("offload_optimizer", (True, False)),
        ("retain_gpu_grad_partition_until_step", (True, False, "auto")),
        ("grad_accum_dtype", (None, "fp32", "bf16", "fp16")),
        ("normalization", ("mean", "sum", "token")),
        ("incomplete_window", ("step", "drop")),
    ],
)
def test_allowed_values_are_kept(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert getattr(RequestZeROSettings(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("stage", 0, STAGES),
        ("stage", 4, STAGES),
        ("stage", "2", STAGES),
        ("stage", True, STAGES),
        ("stage", None, STAGES),
        ("stage", 2.0, STAGES),
        ("offload_optimizer", "cpu", BOOLS),
        ("offload_optimizer", 1, BOOLS),
        ("retain_gpu_grad_partition_until_step", None, RETAINS),
        ("retain_gpu_grad_partition_until_step", 1, RETAINS),
        ("retain_gpu_grad_partition_until_step", "automatic", RETAINS),
        ("grad_accum_dtype", "float32", r"use one of None, 'fp32', 'bf16', 'fp16'\."),
        ("normalization", "tokens", r"use one of 'mean', 'sum', 'token'\."),
        ("normalization", None, r"use one of 'mean', 'sum', 'token'\."),
        ("incomplete_window", "keep", r"use one of 'step', 'drop'\."),
        ("log_metrics", "no", BOOLS),
    ],
)
def test_a_value_that_is_not_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}={value!r} is not allowed: {allowed}$"):
        RequestZeROSettings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("check_grad_overflow", "yes", BOOLS),
        ("consecutive_hysteresis", 0, BOOLS),
        ("on_overflow", "stop", r"use one of 'skip', 'raise', 'drop_request'\."),
        ("max_consecutive_skips", 0, r"use a whole number of at least 1\."),
        ("loss_scale", -1, r"use a number of at least 0\."),
        ("loss_scale", "dynamic", r"use a number of at least 0\."),
        ("loss_scale", True, r"use a number of at least 0\."),
        ("initial_scale_power", -1, r"use a whole number of at least 0 and at most 127\."),
        ("initial_scale_power", 128, r"use a whole number of at least 0 and at most 127\."),
        ("loss_scale_window", 0, r"use a whole number of at least 1\."),
        ("hysteresis", 0, r"use a whole number of at least 1\."),
        ("loss_scale", float("nan"), r"use a number of at least 0\."),
        ("initial_scale_power", 1.5, r"use a whole number of at least 0 and at most 127\."),
        ("loss_scale_window", True, r"use a whole number of at least 1\."),
        ("min_loss_scale", 0, r"use a whole number of at least 1\."),
        ("min_loss_scale", 0.5, r"use a whole number of at least 1\."),
        ("min_loss_scale", "1", r"use a whole number of at least 1\."),
        ("min_loss_scale", True, r"use a whole number of at least 1\."),
    ],
)
def test_an_overflow_value_that_is_not_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"^overflow\.{name}={value!r} is not allowed: {allowed}$"):
        RequestZeROSettings(overflow=OverflowSettings(**{name: value}))


def test_options_that_deepspeed_has_no_place_for_stand_in_a_section_of_ours() -> None:
    upstream = OverflowSettings(check_grad_overflow=True, loss_scale=8)
    assert to_config(OverflowSettings, upstream.given(), "bf16") == {
        "bf16": {"check_grad_overflow": True},
        "fp16": {"loss_scale": 8},
    }
    settings = OverflowSettings(on_overflow="skip", max_consecutive_skips=3, hysteresis=2)
    assert to_config(OverflowSettings, settings.given()) == {
        "overflow": {"on_overflow": "skip", "max_consecutive_skips": 3},
        "fp16": {"hysteresis": 2},
    }


@pytest.mark.parametrize(("precision", "check"), [("fp32", False), ("bf16", True), ("fp16", True)])
def test_defaults_by_precision(precision: str, check: bool) -> None:
    assert OverflowSettings().resolved(precision) == OverflowSettings(check_grad_overflow=check, on_overflow="skip")
    given = OverflowSettings(check_grad_overflow=True, on_overflow="raise")
    assert given.resolved(precision) == given


def test_an_overflow_option_that_does_not_exist() -> None:
    message = (
        r"^overflow\.los_scale is not an option: use one of check_grad_overflow, on_overflow, "
        r"max_consecutive_skips, loss_scale, initial_scale_power, loss_scale_window, hysteresis, "
        r"consecutive_hysteresis, min_loss_scale\.$"
    )
    with pytest.raises(ValueError, match=message):
        OverflowSettings.build({"los_scale": 1})


@pytest.mark.parametrize("value", [True, "skip", 1])
def test_overflow_must_be_settings_or_a_mapping(value: Any) -> None:
    message = f"^overflow={value!r} is not allowed: give OverflowSettings or a mapping of its fields"
    with pytest.raises(ValueError, match=message):
        OverflowSettings.build(value)


def test_overflow_is_built_from_a_mapping_an_object_or_nothing() -> None:
    settings = OverflowSettings(check_grad_overflow=True)
    assert OverflowSettings.build({"check_grad_overflow": True}) == settings
    assert OverflowSettings.build(settings) is settings
    assert OverflowSettings.build(None) == OverflowSettings()


def test_loss_scale_options_are_those_that_were_set() -> None:
    settings = OverflowSettings(check_grad_overflow=True, loss_scale=0, hysteresis=3, consecutive_hysteresis=False)
    assert to_config(OverflowSettings, settings.given())["fp16"] == {
        "loss_scale": 0,
        "hysteresis": 3,
        "consecutive_hysteresis": False,
    }


def test_settings_cannot_be_changed_afterwards() -> None:
    settings = RequestZeROSettings()
    with pytest.raises(FrozenInstanceError, match="stage"):
        settings.stage = 1  # type: ignore[misc]
