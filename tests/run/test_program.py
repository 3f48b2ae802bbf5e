"""A program behaves under ``requestzero.run`` as under ``python``: nothing heavy is imported for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

PROBE = r'''
"""Of the program."""
import atexit, multiprocessing, pickle, sys, threading

class Found:
    def __init__(self, value): self.value = value

def double(found): return Found(found.value * 2)

def show(name, value): sys.stdout.write(f"{name} {value}\n")

def at_exit():
    show("pickled at exit", pickle.loads(pickle.dumps(Found(3))).value)

if __name__ == "__main__":
    for name in ("__name__", "__file__", "__package__", "__doc__", "__cached__"):
        show(name, globals()[name])
    show("spec", getattr(__spec__, "name", None))
    show("loader", type(__loader__).__name__)
    show("names", sorted(name for name in globals() if name.startswith("__")))
    show("argv", sys.argv)
    show("path", sys.path[0])
    show("main", sys.modules["__main__"].__dict__ is globals())
    show("pickled", pickle.loads(pickle.dumps(Found(2))).value)
    show("heavy", sorted({"torch", "accelerate", "deepspeed"} & sys.modules.keys()))
    if not (__spec__ and __spec__.name.endswith("__main__")):  # of which a spawned process has nothing
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            show("spawned", [found.value for found in pool.map(double, [Found(4)])])
    atexit.register(at_exit)
    threading.Thread(target=lambda: show("thread", pickle.loads(pickle.dumps(Found(5))).value)).start()
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "exit": sys.exit(7)
    if what == "done": sys.exit(0)
    if what == "text": sys.exit("no more")
    if what == "error":
        def deeper(): raise ValueError("so it is")
        deeper()
    if what == "hook":
        sys.excepthook = lambda kind, value, traceback: show("hook", (kind.__name__, traceback.tb_frame.f_code.co_name))
        raise KeyError("x")
    if what == "interrupt": raise KeyboardInterrupt
'''
RUN = ("-m", "requestzero.run")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the program as a script, a module of a package, a package, a folder and archives; and other scripts."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    for path in ("script.py", "package/module.py", "package/__main__.py"):
        (folder / path).write_text(PROBE)
    (folder / "folder with spaces").mkdir()
    (folder / "folder with spaces" / "__main__.py").write_text(PROBE)
    for archive in ("archive.zip", "archive.pyz"):
        with ZipFile(folder / archive, "w") as file:
            file.writestr("__main__.py", PROBE)
    (folder / "wrong.py").write_text("x = 1\ny = = 2\n")
    return folder


def play(place: Path, *command: str) -> tuple[int, list[str], list[str]]:
    run = subprocess.run([sys.executable, *command], cwd=place, capture_output=True, text=True, timeout=120)
    told = [line for line in run.stderr.splitlines() if not line.startswith("requestzero.run: nothing became")]
    return run.returncode, sorted(run.stdout.splitlines()), told


@pytest.mark.parametrize(
    "program",
    [
        ("script.py", "a", "--b", "-m", "c d"),
        ("-m", "package.module", "--no-initialize"),
        ("-m", "package", "exit"),
        ("folder with spaces", "text"),
        ("archive.zip", "exit"),
        ("archive.pyz", "a"),
        ("script.py", "error"),
        ("-m", "package.module", "error"),
        ("script.py", "hook"),
        ("script.py", "interrupt"),
        ("wrong.py",),
        ("-m", "nowhere.module"),
        ("-m", "nowhere"),
        ("nowhere.py",),
    ],
    ids=" ".join,
)
def test_it_behaves_as_without(place: Path, program: tuple[str, ...]) -> None:
    expected, found = play(place, *program), play(place, *RUN, *program)
    assert found == expected
    assert expected[1] or expected[2]


@pytest.mark.parametrize("arguments", [(), ("done",)], ids=["to its end", "to sys.exit(0)"])
def test_it_says_that_nothing_was_adopted(place: Path, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, *RUN, "script.py", *arguments]
    run = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0
    assert "requestzero.run: nothing became request-safe: the program has built no DeepSpeedPlugin" in run.stderr


@pytest.mark.parametrize("arguments", [(), ("-m",), ("--no-initialize",), ("--unknown", "script.py")])
def test_wrong_arguments(place: Path, arguments: tuple[str, ...]) -> None:
    code, _, told = play(place, *RUN, *arguments)
    assert code == 2
    assert any("error: " in line for line in told)
