"""Importing the package loads nothing heavy and leaves the process as it was."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import requestzero
from support.scripts import run_code

HEAVY = {
    "torch",
    "numpy",
    "deepspeed",
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "transformers",
    "omegaconf",
    "hydra",
}

# Prints what importing MODULE changed in a process that had imported BEFORE.
PROBE = """
import json, logging, multiprocessing, os, signal, sys, warnings
import concurrent.futures, importlib.metadata
{before}

def state():
    loggers = logging.root.manager.loggerDict
    return {{
        "environment": dict(os.environ),
        "path": list(sys.path),
        "loggers": {{name: (item.level, len(item.handlers), item.propagate, item.disabled)
                    for name, item in loggers.items() if isinstance(item, logging.Logger)}},
        "root logger": (logging.root.level, len(logging.root.handlers), logging.root.disabled),
        "warnings": [str(item) for item in warnings.filters],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "signals": [str(signal.getsignal(item)) for item in (signal.SIGINT, signal.SIGTERM)],
        "excepthook": repr(sys.excepthook),
    }}

before = state()
import {module}
after = state()
print(json.dumps({{
    "changed": [key for key in before if before[key] != after[key]],
    "modules": sorted({{name.split(".")[0] for name in sys.modules}}),
}}))
"""


def output_of(script: str) -> str:
    """The last line that `script` prints in a fresh interpreter."""
    return run_code(script).stdout.splitlines()[-1]


def import_effects(module: str, before: str = "") -> dict[str, Any]:
    """Effects of importing `module` in a fresh interpreter: changed state, and the top-level modules loaded then."""
    return dict(json.loads(output_of(PROBE.format(module=module, before=before))))


@pytest.mark.parametrize(
    "module",
    [
        "requestzero",
        "requestzero.environment.versions",
        "requestzero.config.options",
        "requestzero.data.micro_batch",
        "requestzero.doctor",
        "requestzero.checkpoint",
    ],
)
def test_light_modules_load_nothing_heavy_and_change_nothing(module: str) -> None:
    effects = import_effects(module)
    assert HEAVY.isdisjoint(effects["modules"])
    assert effects["changed"] == []


def test_the_configuration_loads_the_standard_library_only() -> None:
    folder = Path(requestzero.__file__).parent / "config"
    modules = [f"requestzero.config.{path.stem}" for path in sorted(folder.glob("[!_]*.py"))]
    assert len(modules) > 10
    effects = import_effects(", ".join(modules))
    loaded = {*effects["modules"]} - {*import_effects("json")["modules"]}
    assert loaded - {"requestzero"} <= sys.stdlib_module_names
    assert effects["changed"] == []


def test_the_probe_sees_a_heavy_import_and_a_changed_environment(tmp_path: Path) -> None:
    assert "omegaconf" in import_effects("omegaconf")["modules"]
    script = tmp_path / "noisy.py"
    script.write_text("import logging, os\nos.environ['A'] = 'b'\nlogging.getLogger('x').setLevel(10)\n")
    noisy = import_effects("noisy", before=f"sys.path.insert(0, {str(tmp_path)!r})")
    assert noisy["changed"] == ["environment", "loggers"]


def test_the_lightning_module_loads_no_deepspeed() -> None:
    effects = import_effects("requestzero.lightning", before="import lightning.pytorch")
    assert "deepspeed" not in effects["modules"]
    assert effects["changed"] == []


def test_the_lightning_module_registers_its_names() -> None:
    script = (
        "from lightning.pytorch.strategies import StrategyRegistry as registry\n"
        "before = set(registry); import requestzero.lightning; print(*set(registry) - before)"
    )
    assert set(output_of(script).split()) == {
        "request_zero_1",
        "request_zero_2",
        "request_zero_1_offload",
        "request_zero_2_offload",
        "request_zero_3",
        "request_zero_3_offload",
    }
