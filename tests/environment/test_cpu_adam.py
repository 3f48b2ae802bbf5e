"""DeepSpeed's CPU Adam: compiled once for an environment, by one process, past the lock of a build that was killed."""

from __future__ import annotations

import errno
import fcntl
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from requestzero.config.cpu_adam import builds_cpu_adam
from requestzero.environment import build_lock, cpu_adam
from requestzero.environment.build_lock import LockState, lock_state, remove_abandoned_lock

COMPILING = "Compiling DeepSpeed's CPU Adam, once: 20 seconds to some minutes."


@contextmanager
def builder_with(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock as PyTorch's builder does."""
    code = (
        f"import os, time; os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "locked\n"
        yield builder
        builder.send_signal(signal.SIGKILL)


def test_the_lock_of_a_killed_build_is_removed(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert lock_state(lock) is LockState.FREE
    with builder_with(lock):
        assert lock_state(lock) is LockState.BUILDING
        remove_abandoned_lock(lock)
        assert lock.exists(), "its builder is at work"
    assert lock_state(lock) is LockState.ABANDONED
    remove_abandoned_lock(lock)
    assert lock_state(lock) is LockState.FREE
    remove_abandoned_lock(lock)


@pytest.mark.parametrize(
    ("name", "value"), [("os.getuid", lambda: -1), ("_file_system", lambda path: "nfs4")], ids=["user", "machine"]
)
def test_a_lock_of_another_user_or_machine_is_left_and_told(
    name: str, value: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setattr(f"{build_lock.__name__}.{name}", value)
    assert lock_state(lock) is LockState.UNKNOWN
    with pytest.raises(RuntimeError, match="cannot be seen from here: delete the file if nobody"):
        cpu_adam.compile_cpu_adam(lambda line: None)
    assert lock.exists()


def test_the_file_system_of_a_path_is_found() -> None:
    assert build_lock._file_system(Path("/proc/self")) == "proc"


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The logs of the builds that were started, each of which succeeds; nothing is compiled."""
    logs: list[Path] = []

    def build(log: Path) -> int:
        logs.append(log)
        (log.with_name("cpu_adam") / "cpu_adam.so").touch()
        return 0

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(cpu_adam, "_build", build)
    monkeypatch.setattr(cpu_adam, "_installed_with_deepspeed", lambda: False)
    return logs


def test_an_environment_is_compiled_for_once(builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    for _ in range(2):
        cpu_adam.compile_cpu_adam(lines.append)
    assert len(builds) == 1
    assert lines == [COMPILING, "DeepSpeed's CPU Adam is compiled, after 0 s."]
    monkeypatch.setattr(cpu_adam, "version", lambda name: "another")
    cpu_adam.compile_cpu_adam(lines.append)
    assert len(builds) == 2


def test_a_failed_build_says_why_and_what_to_do(builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(log: Path) -> int:
        log.write_text("no such compiler")
        return 1

    with monkeypatch.context() as patched:
        patched.setattr(cpu_adam, "_build", fail)
        with pytest.raises(RuntimeError, match=r"(?s)could not be compiled: install .*torch_adam.*no such compiler$"):
            cpu_adam.compile_cpu_adam(lambda line: None)
    cpu_adam.compile_cpu_adam(lambda line: None)
    assert len(builds) == 1, "tried again"


def test_one_process_compiles_and_the_others_wait(builds: list[Path]) -> None:
    lines: list[str] = []
    cpu_adam.build_folder().mkdir(parents=True)
    with cpu_adam.build_folder().with_name("cpu_adam.builder").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.3, lambda: fcntl.flock(held, fcntl.LOCK_UN)).start()
        with pytest.raises(RuntimeError, match="could not be compiled"):  # as the other process has found
            cpu_adam.compile_cpu_adam(lines.append)
    assert lines == ["Waiting for another process, which compiles DeepSpeed's CPU Adam."]
    assert builds == []


def test_the_builder_of_a_killed_process_is_waited_for(builds: list[Path]) -> None:
    lines: list[str] = []
    lock = cpu_adam.build_folder() / "lock"
    lock.parent.mkdir(parents=True)
    with builder_with(lock) as builder, lock.parent.with_name("cpu_adam.builder").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.3, lambda: fcntl.flock(held, fcntl.LOCK_UN)).start()
        threading.Timer(0.6, builder.kill).start()
        cpu_adam.compile_cpu_adam(lines.append)
    assert [line.split(" ")[0] for line in lines] == ["Waiting", "Waiting", "Removed", "Compiling", "DeepSpeed's"]
    assert len(builds) == 1


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_told(number: int, builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "no locks")

    lines: list[str] = []
    monkeypatch.setattr(fcntl, "flock", refuse)
    cpu_adam.compile_cpu_adam(lines.append)
    assert lines[0].endswith("cannot be locked (no locks): another process may compile at the same time.")
    assert len(builds) == 1


def test_a_build_of_deepspeeds_own_is_waited_for_and_its_lock_removed(builds: list[Path]) -> None:
    lines: list[str] = []
    lock = cpu_adam.build_folder() / "lock"
    lock.parent.mkdir(parents=True)
    with builder_with(lock) as builder:
        threading.Timer(0.3, builder.kill).start()
        cpu_adam.compile_cpu_adam(lines.append)
    assert [line.split(" ")[0] for line in lines] == ["Waiting", "Removed", "Compiling", "DeepSpeed's"]
    assert not lock.exists()
    assert len(builds) == 1


def test_a_lock_is_cleared_before_deepspeed_compiles_by_itself(builds: list[Path]) -> None:
    lines: list[str] = []
    cpu_adam.clear_abandoned_lock(lines.append)
    lock = cpu_adam.build_folder() / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    cpu_adam.clear_abandoned_lock(lines.append)
    assert not lock.exists()
    assert lines == [f"Removed {lock}: the process that compiled DeepSpeed's CPU Adam has ended without removing it."]


def test_the_folder_is_pytorchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    assert str(cpu_adam.build_folder()) == cpp_extension._get_build_directory("cpu_adam", verbose=False)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    assert str(cpu_adam.build_folder()) == cpp_extension._get_build_directory("cpu_adam", verbose=False)


OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
CONFIGS = {
    "offload": ({"type": "AdamW", "params": {"lr": 1e-3}}, OFFLOAD, True),
    "PyTorch's": ({"type": "AdamW", "params": {"torch_adam": True}}, OFFLOAD, False),
    "another optimizer": ({"type": "SGD"}, OFFLOAD, False),
    "on the device": ({"type": "Adam"}, {"stage": 2}, False),
    "offload to none": ({"type": "Adam"}, {"stage": 2, "offload_optimizer": {"device": "none"}}, False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_that_need_it_are_known(name: str) -> None:
    optimizer, zero, needed = CONFIGS[name]
    assert builds_cpu_adam({"optimizer": optimizer, "zero_optimization": zero}) is needed
    assert not builds_cpu_adam({"zero_optimization": zero})


def test_an_engine_compiles_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import requestzero
    from requestzero.zero import initialization

    class Compiled(Exception):
        pass

    def compile_it() -> None:
        raise Compiled

    monkeypatch.setattr(initialization, "compile_cpu_adam", compile_it)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": OFFLOAD}
    with pytest.raises(Compiled):
        requestzero.initialize(model=torch.nn.Linear(2, 2), config=config)
