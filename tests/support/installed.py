"""Other versions of packages than the installed ones."""

from __future__ import annotations

import importlib.metadata

import pytest


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
