"""DeepSpeed's compiler driver is found without an activated environment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from requestzero.ninja_path import put_ninja_on_path


def test_the_packaged_ninja_is_appended_where_none_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    put_ninja_on_path()
    assert os.environ["PATH"].startswith(f"{tmp_path}{os.pathsep}")
    assert shutil.which("ninja") is not None


def test_a_ninja_that_is_found_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "ninja"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    put_ninja_on_path()
    assert os.environ["PATH"] == str(tmp_path)


def test_without_the_package_nothing_is_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("requestzero.ninja_path.find_spec", lambda name: None)
    put_ninja_on_path()
    assert os.environ["PATH"] == str(tmp_path)
