"""The script of the matrix: what is wrong with its command, its environments or its tests is told."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import run
from cells import CELLS, Cell


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["run.py", "--dry", *arguments])
    return run.main()


def test_a_cell_that_does_not_exist_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(monkeypatch, "oldest", "DeepSpeed 0.18")
    assert "no cells: DeepSpeed 0.18. There are: pinned, oldest, " in capsys.readouterr().err


class Ran:
    """An environment whose self-test has this result."""

    def __init__(self, folder: Path, **result: Any) -> None:
        self.folder = folder
        self._result = {"passed": True, "stage_3": True, "different": [], "wrong": 0, "updates": 615, **result}

    def output(self, *arguments: str, allowed: tuple[int, ...] = (0,)) -> str:
        return json.dumps({"Python": "3.11"} if arguments[0] == "-c" else self._result)

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """End without having written anything."""
        return subprocess.CompletedProcess(arguments, 1)


@pytest.mark.parametrize(
    ("result", "failed", "status"),
    [
        ({}, 0, 0),
        ({}, 1, 1),
        ({"passed": False, "wrong": 2}, 0, 1),
        ({"different": ["a:b"]}, 0, 1),
    ],
)
def test_what_has_failed_is_in_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, result: dict[str, Any], failed: int, status: int
) -> None:
    outcomes = Counter(passed=3, failed=failed) if failed else Counter(passed=3)
    monkeypatch.setattr(run, "environment_of", lambda cell, folder: Ran(tmp_path, **result))
    monkeypatch.setattr(run, "fast_tests", lambda environment: outcomes)
    assert main(monkeypatch, "pinned", "--tests", f"--folder={tmp_path}") == status
    row = run.measure(CELLS[0], Ran(tmp_path, **result), tests=True)  # type: ignore[arg-type]
    assert row["tests"] == ("3 passed, 1 failed" if failed else "3 passed")


def test_tests_that_end_without_a_report_are_told(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text("of an earlier run")
    with pytest.raises(SystemExit, match=r"ended without a report, see .*tests\.log"):
        run.fast_tests(Ran(tmp_path))  # type: ignore[arg-type]


def test_of_an_interrupted_installation_nothing_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``pip`` writes into the folder that it is given, and is interrupted the first time."""
    ends: list[type[BaseException] | None] = [KeyboardInterrupt, None]

    def pip(python: str, *arguments: str) -> None:
        target = Path(arguments[arguments.index("--target") + 1])
        target.mkdir()
        error = ends.pop(0)
        if error is not None:
            raise error
        (target / "installed").touch()

    monkeypatch.setattr(run, "pip", pip)
    with pytest.raises(KeyboardInterrupt):
        run.overlay("deepspeed", "0.19.6", tmp_path)
    assert (Path(run.overlay("deepspeed", "0.19.6", tmp_path)) / "installed").exists()
    assert ends == []


def test_the_table_says_what_runs_the_tests_of_a_cell() -> None:
    rows = {cell.name: {"versions": {}, "self_test": "", "date": ""} for cell in CELLS}
    shown = {line.split(" | ")[0].strip("| "): line for line in run.table(rows).splitlines()}
    assert "CI runs `make test`" in shown["pinned"]
    assert "not run" in shown[Cell("oldest").name]
