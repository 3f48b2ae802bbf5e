"""DeepSpeed's CPU Adam, compiled once before any test.

Compiling takes 20 seconds to some minutes. A rank that does it could be killed by a test's time limit, and would leave
PyTorch's lock behind, for which every later use of the operator waits without end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

# The accelerator that the ranks of the tests have, see support.ranks.
_BUILD = """
import os, torch
if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("CPUAdamBuilder").load(verbose=False)
"""


def compile_cpu_adam(folder: Path, say: Callable[[str], None]) -> None:
    """Compile the operator into ``folder`` (``TORCH_EXTENSIONS_DIR``), unless that has been done for these versions."""
    stamp, environment = folder / "cpu_adam.compiled_for", _environment()
    if stamp.exists() and stamp.read_text() == environment:
        return
    folder.mkdir(parents=True, exist_ok=True)
    remove_abandoned_lock(folder / "cpu_adam" / "lock")
    say("Compiling DeepSpeed's CPU Adam, once: 20 seconds to some minutes.")
    log = folder / "cpu_adam.log"
    if _build(log) == 0:
        stamp.write_text(environment)
    else:
        say(f"It could not be compiled; tests that need it will fail. {log} ends with:\n{log.read_text()[-1500:]}")


def remove_abandoned_lock(lock: Path) -> None:
    """Remove the lock of a build whose process has ended: PyTorch's builder keeps the file open while it works."""
    if lock.exists() and not _is_open(lock):
        lock.unlink(missing_ok=True)


def _is_open(path: Path) -> bool:
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if link.readlink() == path.resolve():
                return True
    return False


def _environment() -> str:
    """Return the versions and the place that a compiled operator depends on, as text."""
    packages = [f"{name} {version(name)}" for name in ("deepspeed", "torch")]
    return "\n".join([sys.prefix, sys.version, *packages])


def _build(log: Path) -> int:
    """Build in a session of its own, which goes on when the tests are interrupted; the exit status."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])  # ninja
    with log.open("w") as file:
        builder = subprocess.Popen(
            [sys.executable, "-c", _BUILD],
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return builder.wait()
