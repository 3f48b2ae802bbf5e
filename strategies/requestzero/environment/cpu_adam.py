"""DeepSpeed's CPU Adam, compiled once and ahead of the ranks that use it; and the locks of builds that were killed.

DeepSpeed compiles the operator on first use, in 20 seconds to some minutes, within the rank that needs it. A rank that
is killed meanwhile leaves PyTorch's lock file behind, for which every later use waits without end.
``python -m requestzero.environment.cpu_adam`` compiles, for example when a container is built.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from requestzero.environment.build_lock import LockState, lock_state, remove_abandoned_lock

_BUILD = """
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("CPUAdamBuilder").load(verbose=False)
"""
_LAST = 1500
"""Characters of a failed build's log in its error."""
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a file system that has no locks."""
_PAUSE = 0.2
"""Seconds between two looks at a lock."""


def say(line: str) -> None:
    """Print a line of progress to standard error, which no report is read from."""
    print(line, file=sys.stderr, flush=True)


def compile_cpu_adam(tell: Callable[[str], None] = say) -> None:
    """Compile the operator, unless that has been done for the installed versions or DeepSpeed was installed with it.

    One process of a machine compiles, in a session of its own, which goes on when this one is killed; the others wait
    for it. To be called before, not within, collectives.

    Args:
        tell: called with lines of progress.

    Raises:
        RuntimeError: it cannot be compiled, or another user's or machine's build is waited for; says what to do.
    """
    folder = build_folder()
    stamp = folder.with_name("cpu_adam.compiled_for")
    if _is_compiled(stamp) or _installed_with_deepspeed():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(folder.with_name("cpu_adam.builder"), tell) as waited:
        if _is_compiled(stamp):
            return
        log, lock = folder.with_name("cpu_adam.log"), folder / "lock"
        # The process before this one was killed, if its builder is still at work; else it failed, as this one would.
        if waited and lock_state(lock) is LockState.FREE:
            raise _failure(log)
        _clear_lock(lock, tell)
        tell("Compiling DeepSpeed's CPU Adam, once: 20 seconds to some minutes.")
        begun = time.monotonic()
        if _build(log) != 0:
            raise _failure(log)
        stamp.write_text(_environment(), encoding="utf-8")
        tell(f"DeepSpeed's CPU Adam is compiled, after {time.monotonic() - begun:.0f} s.")


def clear_abandoned_lock(tell: Callable[[str], None] = say) -> None:
    """Remove the lock of a build that was killed, and say so. For those who let DeepSpeed compile by itself."""
    lock = build_folder() / "lock"
    if lock_state(lock) is LockState.ABANDONED:
        _remove(lock, tell)


def build_folder() -> Path:
    """Return the folder in which PyTorch builds the operator, whether it exists or not."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is not None:
        return Path(root, "cpu_adam")
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    cuda = torch.version.cuda
    accelerator = f"cu{cuda.replace('.', '')}" if cuda else "cpu"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(get_default_build_root(), f"{python}_{accelerator}", "cpu_adam")


def _is_compiled(stamp: Path) -> bool:
    library = stamp.with_name("cpu_adam") / "cpu_adam.so"
    return library.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == _environment()


def _environment() -> str:
    """Return the versions and the place that a compiled operator depends on, as text."""
    packages = [f"{name} {version(name)}" for name in ("deepspeed", "torch")]
    return "\n".join([sys.prefix, sys.version, *packages])


def _installed_with_deepspeed() -> bool:
    from deepspeed.git_version_info import installed_ops

    return bool(installed_ops.get("cpu_adam", False))


@contextmanager
def _one_at_a_time(path: Path, tell: Callable[[str], None]) -> Iterator[bool]:
    """Hold a lock of the kernel, which ends with its process; yield true if another process had it first.

    On a file system without such locks the block runs without one: PyTorch's own lock remains.
    """
    with path.open("w") as file:
        waited = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("Waiting for another process, which compiles DeepSpeed's CPU Adam.")
            fcntl.flock(file, fcntl.LOCK_EX)
            waited = True
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            tell(f"{path} cannot be locked ({error.strerror}): another process may compile at the same time.")
        yield waited


def _clear_lock(lock: Path, tell: Callable[[str], None]) -> None:
    """Wait for a build that DeepSpeed has started by itself, and remove the lock of one that was killed.

    Raises:
        RuntimeError: it cannot be seen from here if the builder is alive.
    """
    state = lock_state(lock)
    if state is LockState.BUILDING:
        tell(f"Waiting for the process that compiles DeepSpeed's CPU Adam ({lock}).")
    while state is LockState.BUILDING:
        time.sleep(_PAUSE)
        state = lock_state(lock)
    if state is LockState.UNKNOWN:
        raise RuntimeError(
            f"A build of DeepSpeed's CPU Adam has the lock {lock}, which belongs to another user or lies on a file "
            "system of several machines, so that its process cannot be seen from here: delete the file if nobody "
            "compiles, or set TORCH_EXTENSIONS_DIR to a folder of this machine."
        )
    if state is LockState.ABANDONED:
        _remove(lock, tell)


def _remove(lock: Path, tell: Callable[[str], None]) -> None:
    remove_abandoned_lock(lock)
    tell(f"Removed {lock}: the process that compiled DeepSpeed's CPU Adam has ended without removing it.")


def _build(log: Path) -> int:
    """Build in a process of its own, which goes on when this one is interrupted; return its exit status."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])  # ninja
    with log.open("w", encoding="utf-8") as file:
        builder = subprocess.Popen(
            [sys.executable, "-c", _BUILD],
            env={**os.environ, **_accelerator(), "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return builder.wait()


def _accelerator() -> dict[str, str]:
    """Return the accelerator of this process for the builder, whose environment may lack what this one has set."""
    from deepspeed.accelerator import get_accelerator

    return {"DS_ACCELERATOR": get_accelerator().device_name()}


def _failure(log: Path) -> RuntimeError:
    said = log.read_text(encoding="utf-8", errors="replace")[-_LAST:] if log.exists() else ""
    return RuntimeError(
        "DeepSpeed's CPU Adam could not be compiled: install a C++ compiler and ninja, or use PyTorch's optimizer "
        '("torch_adam": true in the parameters of the config\'s optimizer; with an optimizer of your own '
        f"zero_force_ds_cpu_optimizer: false). {log} ends with:\n{said}"
    )


if __name__ == "__main__":
    compile_cpu_adam()
