"""The README's Python examples, run as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import README

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")

# Heading of the section -> how it says that its example is started.
STARTED_WITH: dict[str, tuple[str, ...]] = {
    "Engine": TORCHRUN,
    "Lightning": (),
    "Accelerate": TORCHRUN,
    "Transformers' Trainer": TORCHRUN,
}


def examples() -> dict[str, str]:
    """Heading -> the section's Python block."""
    sections = re.split(r"^## ", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        section.splitlines()[0]: block
        for section in sections
        for block in re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    }


def run_example(heading: str, folder: Path) -> str:
    """The last line that the example prints."""
    script = folder / "train.py"
    script.write_text(examples()[heading], encoding="utf-8")
    scripts = os.path.dirname(sys.executable)  # ninja, for DeepSpeedCPUAdam
    run = subprocess.run(
        [sys.executable, *STARTED_WITH[heading], str(script)],
        cwd=folder,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1]


def test_every_python_example_is_run() -> None:
    assert set(examples()) == set(STARTED_WITH)
    assert README.read_text(encoding="utf-8").count("```python") == len(STARTED_WITH)


def test_the_engine_example(tmp_path: Path) -> None:
    updates, micro_batches, norm = run_example("Engine", tmp_path).split()
    assert (updates, micro_batches) == ("2", "5")
    assert float(norm) > 0


@pytest.mark.slow
def test_the_lightning_example(tmp_path: Path) -> None:
    attempted, applied, skipped, norm = run_example("Lightning", tmp_path).split()
    assert (attempted, applied, skipped) == ("6", "6", "0")
    assert float(norm) > 0


@pytest.mark.slow
def test_the_accelerate_example(tmp_path: Path) -> None:
    applied, skipped, norm = run_example("Accelerate", tmp_path).split()
    assert (applied, skipped) == ("5", "0"), "18 micro-batches, four to an update, and a last one of two"
    assert float(norm) > 0


@pytest.mark.slow
def test_the_trainer_example(tmp_path: Path) -> None:
    assert run_example("Transformers' Trainer", tmp_path) == "3 RequestZeROOptimizer"


@pytest.mark.parametrize("name", ["make demo", "make probe", "make test", "make docs"])
def test_the_commands_exist(name: str) -> None:
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    assert name in README.read_text(encoding="utf-8")
    assert re.search(rf"^{name.split()[1]}:", makefile, flags=re.MULTILINE)
