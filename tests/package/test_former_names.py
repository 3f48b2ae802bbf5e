"""Names that users may have written before a module or class moved: they still work, and warn."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import requestzero
from requestzero import former_names
from support.scripts import run_code

FOLDER = Path(former_names.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(FOLDER).with_suffix("").parts) for path in FOLDER.rglob("*.py") if path.stem != "__init__"
)


@pytest.mark.parametrize("name", MODULES)
def test_a_former_module_is_the_current_one_and_warns(name: str) -> None:
    script = f"import sys, requestzero.{name}; print(sys.modules['requestzero.{name}'].__name__)"
    run = run_code(script, "-W", "default")
    current = run.stdout.split()[-1]
    assert f"<string>:1: DeprecationWarning: requestzero.{name} has moved: import {current} instead." in run.stderr
    assert importlib.import_module(current).__name__ == current


def test_there_are_former_modules() -> None:
    assert {"collate", "packing", "labels", "agreement.errors", "optimizer.engine"} <= set(MODULES)


def test_the_former_name_of_an_error_is_the_error() -> None:
    assert requestzero.RankDisagreement is requestzero.RankDisagreementError


def test_training_arguments_are_found_in_their_former_place() -> None:
    import requestzero.accelerate
    from requestzero.transformers import RequestZeROTrainingArguments

    with pytest.warns(DeprecationWarning, match=r"import it from requestzero\.transformers instead"):
        assert requestzero.accelerate.RequestZeROTrainingArguments is RequestZeROTrainingArguments


def test_a_former_argument_is_the_current_one_and_warns() -> None:
    from requestzero.accelerate import Requests

    accelerator: Any = SimpleNamespace(num_processes=1)
    with pytest.warns(DeprecationWarning, match="requests_per_window is now called requests_per_update") as found:
        batches = Requests(accelerator).micro_batches([], requests_per_window=3)  # type: ignore[call-arg]
    assert batches.requests_per_update == 3
    assert [item.filename for item in found] == [__file__]
    with pytest.raises(TypeError, match="requests_per_window is the former name of requests_per_update"):
        Requests(accelerator).micro_batches([], requests_per_update=2, requests_per_window=3)  # type: ignore[call-arg]


def test_former_attributes_of_a_window_are_the_current_ones_and_warn() -> None:
    from requestzero.zero.common.window import UpdateWindow

    window = UpdateWindow()
    window.weights.add(3)
    with pytest.warns(DeprecationWarning, match=r"reported_weights is now called weights\.reported") as found:
        assert window.reported_weights == 1
    assert [item.filename for item in found] == [__file__]
    with pytest.warns(DeprecationWarning, match=r"host_weight is now called weights\.on_host"):
        assert window.host_weight == 3
    with pytest.warns(DeprecationWarning, match=r"device_weight is now called weights\.on_device"):
        assert window.device_weight is None


def test_former_methods_of_the_overflow_settings_return_what_they_did_and_warn() -> None:
    settings = requestzero.OverflowSettings(on_overflow="raise", hysteresis=3, loss_scale=0)
    with pytest.warns(DeprecationWarning, match=r"own_options\(\) is deprecated: use given\(\)") as found:
        assert settings.own_options() == {"on_overflow": "raise"}
    assert [item.filename for item in found] == [__file__]
    with pytest.warns(DeprecationWarning, match=r"loss_scale_options\(\) is deprecated"):
        assert settings.loss_scale_options() == {"loss_scale": 0, "hysteresis": 3}
