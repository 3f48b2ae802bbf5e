"""Other versions of packages than the installed ones."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from requestzero.environment import versions
from requestzero.environment.proved_sources import path_of, proved_sources

ENGINE = "deepspeed.runtime.engine"
CHANGED_STEP = {ENGINE: ("def step(self, lr_kwargs=None):", "def step(self, lr_kwargs=None, more=None):")}
"""A change that is relied on."""


def pretend_installed(monkeypatch: pytest.MonkeyPatch, name: str, version: str | None) -> None:
    """Let the installed version of ``name`` be ``version``; ``None``: it is missing."""
    original = importlib.metadata.version

    def installed(asked: str) -> str:
        if asked != name:
            return original(asked)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)


def pretend_deepspeed(monkeypatch: pytest.MonkeyPatch, folder: Path, changes: dict[str, tuple[str, str]]) -> None:
    """Let the installed DeepSpeed be a copy in ``folder`` of what is relied on, with changes of text by module."""
    original = versions.deepspeed_folder()
    assert original is not None
    for module in proved_sources().modules:
        source = path_of(original, module)
        path = folder / source.relative_to(original)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text()
        old, new = changes.get(module, ("", ""))
        assert old in text
        path.write_text(text.replace(old, new, 1) if old else text)
    monkeypatch.setattr(versions, "deepspeed_folder", lambda: folder)


def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no DeepSpeed be installed."""
    monkeypatch.setattr(versions, "deepspeed_folder", lambda: None)
