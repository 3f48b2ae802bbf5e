"""``python`` that has imported DeepSpeed: what a program can see of its process is as under ``python``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.preloaded import client, executable

SCRIPT = """
import os, sys
print(sys.argv, sys.path[0], os.getcwd(), os.environ["MARK"], __name__, sys.stdin.read())
print("to the other", file=sys.stderr)
sys.exit(3)
"""


def run(python: str, folder: Path, *arguments: str) -> tuple[int, str, str]:
    environment = {**os.environ, "MARK": "a=b"}
    ended = subprocess.run(
        [python, *arguments], cwd=folder, env=environment, input="given", capture_output=True, text=True, timeout=120
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("arguments", [("script.py", "-x", "y z"), ("-u", "-m", "script", "-x"), ("-B", "-c", SCRIPT)])
def test_a_program_ends_as_under_python(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert run(executable(), tmp_path, *arguments) == run(sys.executable, tmp_path, *arguments)


@pytest.mark.parametrize(
    "code", ["raise KeyError('x')", "import os; os.kill(os.getpid(), 9)", "import sys; sys.exit('no')"]
)
def test_a_failure_is_the_same(tmp_path: Path, code: str) -> None:
    ended = [run(which, tmp_path, "-c", code) for which in (executable(), sys.executable)]
    (found, _, told), (expected, _, text) = ended
    assert found == expected != 0
    assert told.splitlines()[-1:] == text.splitlines()[-1:]


def test_deepspeed_is_there_already_and_nothing_of_this_package(tmp_path: Path) -> None:
    code = "import sys; print('deepspeed' in sys.modules, any(name.startswith('requestzero') for name in sys.modules))"
    assert run(executable(), tmp_path, "-c", code)[1] == "True False\n"
    assert run(executable(), tmp_path, "-I", "-c", code)[1] == "False False\n", "an option of the interpreter: python"
    assert [client.can_be_preloaded(each) for each in (["-X", "dev", "a.py"], ["folder"], [])] == [False] * 3


CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_a_killed_program_leaves_nothing_behind(kill: Callable[[int, int], None]) -> None:
    command = [executable(), "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert is_alive(child)
        kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20.0
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def test_a_signal_reaches_the_program() -> None:
    code = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(7))\nprint('ready', flush=True)\nsignal.pause()"
    with subprocess.Popen([executable(), "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(timeout=60) == 7
