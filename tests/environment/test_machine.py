"""The description of the machine."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import pytest

from requestzero.environment import machine


def test_the_machine_is_described() -> None:
    seen = machine.describe_machine(ranks=3)
    assert seen.versions["Python"] == platform.python_version()
    assert seen.versions["deepspeed"] == metadata.version("deepspeed")
    assert (seen.ranks, seen.cpus) == (3, len(os.sched_getaffinity(0)))
    assert (seen.accelerator, seen.backend) in {("cpu", "gloo"), ("cuda", "nccl")}
    assert seen.rows()["ranks"] == "3"
    assert all(seen.rows().values())


def test_a_package_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    versions = machine.installed_versions()
    assert versions["no-such-package"] is None
    assert versions["torch"] == metadata.version("torch")
