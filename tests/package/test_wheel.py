"""The contents of a built distribution, and that the package works from it alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from requestzero import __version__
from support.paths import ROOT

PARTS = {"requestzero": ROOT / "strategies/requestzero", "requestzero/configs": ROOT / "configs"}
PARTS["requestzero/recipes"] = ROOT / "recipes"


def build(target: Path, *arguments: str) -> zipfile.ZipFile:
    """The wheel that `python -m build` makes of this checkout in `target`."""
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(target),
        *arguments,
        str(ROOT),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = target.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build(tmp_path_factory.mktemp("wheel"), "--wheel")


def source_files() -> set[str]:
    """Every file of the package, by its name in the wheel."""
    return {
        f"{prefix}/{path.relative_to(folder).as_posix()}"
        for prefix, folder in PARTS.items()
        for directory, _, names in os.walk(folder)  # does not follow the links to configs and recipes
        for path in (Path(directory, name) for name in names)
        if "__pycache__" not in path.parts
    }


def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(f"requestzero-{__version__}.dist-info/METADATA").decode())


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    info = f"requestzero-{__version__}.dist-info"
    names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names} == {"requestzero", info}
    assert {name for name in names if not name.startswith(info)} == source_files()
    assert f"{info}/licenses/LICENSE" in names
    assert {"requestzero/py.typed", "requestzero/recipes/__init__.py"} <= names
    assert "requestzero/probe/page.html.jinja" in names
    assert any(name.startswith("requestzero/configs/") and name.endswith(".yaml") for name in names)


def test_the_source_distribution_builds_the_same_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    from_sdist = build(tmp_path)  # without arguments: a source distribution, and the wheel from that
    assert {item.filename: item.CRC for item in from_sdist.infolist()} == {
        item.filename: item.CRC for item in wheel.infolist()
    }


def test_the_metadata_say_what_is_needed(wheel: zipfile.ZipFile) -> None:
    fields = metadata(wheel)
    assert fields["Requires-Python"] == ">=3.10"
    assert fields["License-Expression"] == "Apache-2.0"
    assert set(fields.get_all("Provides-Extra", [])) == {"accelerate", "recipes", "cli", "probe", "trl", "docs", "dev"}
    requirements = map(Requirement, fields.get_all("Requires-Dist", []))
    names = {item.name for item in requirements if "extra" not in str(item.marker)}
    assert {"accelerate", "deepspeed", "lightning", "omegaconf", "torch"} <= names
    assert names.isdisjoint({"hydra-core", "jsonargparse", "matplotlib", "sphinx", "transformers"})


def test_the_constraints_pin_every_requirement_within_its_range(wheel: zipfile.ZipFile) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(pin.name): pin.specifier for pin in map(Requirement, filter(_is_pin, lines))}
    requirements = [Requirement(text) for text in metadata(wheel).get_all("Requires-Dist", [])]
    needed = {canonicalize_name(item.name): item.specifier for item in requirements if item.name != "requestzero"}
    assert needed
    for name, allowed in needed.items():
        (pin,) = pins[name]
        assert pin.operator == "=="
        assert allowed.contains(pin.version), f"{name}: {pin} is not in {allowed}"


def _is_pin(line: str) -> bool:
    return bool(line) and not line.startswith("#")


def test_the_package_and_its_data_load_from_the_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    script = (
        "import importlib.resources, requestzero, requestzero.recipes\n"
        "configs = importlib.resources.files('requestzero.configs').iterdir()\n"
        "print(requestzero.__file__, any(item.name.endswith('.yaml') for item in configs))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert run.stdout.split() == [str(tmp_path / "requestzero/__init__.py"), "True"], run.stderr


def test_every_module_is_valid_in_the_oldest_declared_python() -> None:
    sources = [path for folder in PARTS.values() for path in folder.rglob("*.py")]
    assert sources
    for path in sources:
        ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=(3, 10))
