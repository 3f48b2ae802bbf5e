"""The compilation before the tests: once for an environment, and past the lock of a build that was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import cpu_adam


def test_the_lock_of_a_killed_build_is_removed(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    code = (
        f"import os, time; os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "locked\n"
        cpu_adam.remove_abandoned_lock(lock)
        assert lock.exists(), "its builder is at work"
        builder.send_signal(signal.SIGKILL)
    cpu_adam.remove_abandoned_lock(lock)
    assert not lock.exists()
    cpu_adam.remove_abandoned_lock(lock)


def test_an_environment_is_compiled_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[Path] = []
    lines: list[str] = []

    def build(log: Path) -> int:
        builds.append(log)
        log.write_text("no compiler")
        return int(len(builds) == 1)

    monkeypatch.setattr(cpu_adam, "_build", build)
    for built in (1, 2, 2):  # the first build fails
        cpu_adam.compile_cpu_adam(tmp_path / "extensions", lines.append)
        assert len(builds) == built
    started, failed, again = lines
    assert started == again == "Compiling DeepSpeed's CPU Adam, once: 20 seconds to some minutes."
    assert failed.startswith("It could not be compiled; tests that need it will fail.")
    assert failed.endswith("no compiler")
    monkeypatch.setattr(cpu_adam, "version", lambda name: "another")
    cpu_adam.compile_cpu_adam(tmp_path / "extensions", lines.append)
    assert len(builds) == 3
