"""Releases of DeepSpeed, where a test depends on one: on its own optimizer, or on a name that an older one lacks."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.version import Version

PINNED = "0.19.8"
"""The release with which DeepSpeed's own results were measured."""


def is_deepspeed_since(version: str) -> bool:
    """Return whether the installed DeepSpeed is this release or a later one."""
    return Version(metadata.version("deepspeed")) >= Version(version)


def needs_deepspeed(reason: str, version: str = PINNED) -> pytest.MarkDecorator:
    """Mark a test that says nothing with an older DeepSpeed, as one of ``tests/matrix`` may have.

    Args:
        reason: shown in the cells of the matrix.
        version: the oldest release with which it says something.
    """
    return pytest.mark.skipif(not is_deepspeed_since(version), reason=f"DeepSpeed {version}: {reason}")
