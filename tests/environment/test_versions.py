"""Which DeepSpeed is accepted, and that the version facts stand in one place."""

from __future__ import annotations

import re

import pytest

import requestzero
from requestzero.environment.versions import SUPPORTED_DEEPSPEED, __version__, require_supported_deepspeed
from support.installed import pretend_installed
from support.paths import ROOT

PIP_LINE = r'pip install "deepspeed==0\.19\.8"'


@pytest.mark.parametrize("version", ["0.19.8", "0.19.8+cu128", "0.19.8+1ab2c3d"])
def test_a_supported_deepspeed_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend_installed(monkeypatch, "deepspeed", version)
    require_supported_deepspeed()


@pytest.mark.parametrize("version", ["0.19.7", "0.19.9", "0.20.0", "0.19.8rc1", "0.19.9.dev0+abc", "1.0"])
def test_another_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend_installed(monkeypatch, "deepspeed", version)
    message = rf"supports DeepSpeed ==0\.19\.8, but {re.escape(version)} is installed\. Run: {PIP_LINE}"
    with pytest.raises(ImportError, match=message):
        require_supported_deepspeed()


def test_a_missing_deepspeed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, "deepspeed", None)
    with pytest.raises(ImportError, match=rf"needs DeepSpeed ==0\.19\.8, and none is installed\. Run: {PIP_LINE}"):
        require_supported_deepspeed()


def test_the_first_use_checks_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, "deepspeed", "0.18.0")
    with pytest.raises(ImportError, match=rf"but 0\.18\.0 is installed\. Run: {PIP_LINE}"):
        requestzero.initialize(model=None, config={})
    with pytest.raises(ImportError, match=rf"but 0\.18\.0 is installed\. Run: {PIP_LINE}"):
        requestzero.RequestZeRO()


def test_pyproject_and_constraints_name_the_supported_deepspeed() -> None:
    assert f'"deepspeed{SUPPORTED_DEEPSPEED}"' in (ROOT / "pyproject.toml").read_text()
    assert f"\ndeepspeed{SUPPORTED_DEEPSPEED}\n" in (ROOT / "constraints.txt").read_text()


def test_the_changelog_opens_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == __version__
