"""Programs that start ranks of their own, as a user starts them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from support.preloaded import executable

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")


class ProgramError(AssertionError):
    """A program has not ended well; its argument is what it has printed."""

    @property
    def errors(self) -> list[str]:
        """The exceptions in it, without their tracebacks."""
        return re.findall(r"(?ms)^[\w.]+(?:Error|Exception): .*?(?=^Traceback|^$|\Z)", str(self))


def start(*arguments: str, python: str | None = None, **environment: str) -> subprocess.Popen[str]:
    """``python ...``, in a process group of its own, without what this process was given for ranks of its own.

    Args:
        arguments: of the interpreter.
        python: the interpreter; by default one that has imported DeepSpeed.
        environment: further variables.
    """
    inherited = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    return subprocess.Popen(
        [python or executable(), *arguments],
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def start_module(module: str, *arguments: str, python: str | None = None, **environment: str) -> subprocess.Popen[str]:
    """``python -m module ...``."""
    return start("-m", module, *arguments, python=python, **environment)


def finish(process: subprocess.Popen[str], timeout: float = 150.0) -> str:
    """The output of a program that has to end well; one that takes too long is killed with all that it has started."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"not done after {timeout:.0f} s:\n{output}")
    if process.returncode != 0:
        raise ProgramError(output)
    return output


def run_code(code: str, *options: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """``python -c code`` in a fresh interpreter, which has to end well."""
    run = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=timeout)
    assert run.returncode == 0, run.stderr
    return run
