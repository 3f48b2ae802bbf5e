"""Run the self-test, and with ``--tests`` the fast tests, in every environment, and write the table of the docs.

    python tests/matrix/run.py                                   # the self-test in every cell
    python tests/matrix/run.py "DeepSpeed 0.19.6" --tests        # one cell, with the fast tests
    python tests/matrix/run.py --dry "DeepSpeed 0.19.6"          # only the exit status; nothing is written

Environments are kept in ``--folder`` and used again; beside each is what its tests have printed, ``tests.log``. Results
are kept in ``results.json``, a cell at a time. The exit status is 1 where a self-test or a test has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from cells import CELLS, Cell
from refusals import PROPERTY

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs/reference/versions.md"
OURS = (str(ROOT / "strategies"), str(Path(__file__).parent))
"""On the path of every environment: the package, and the plugin ``refusals``."""
SHOWN = ("torch", "deepspeed", "lightning", "accelerate", "transformers")
MARKS = ("<!-- matrix: begin (python tests/matrix/run.py) -->", "<!-- matrix: end -->")
BUILD = ("setuptools", "wheel", "packaging", "hatchling", "numpy", "ninja")
"""What DeepSpeed's and this package's builds need: they run in the environment itself, where DeepSpeed finds torch."""

PINNED = ("tests/test_upstream_contract.py", "tests/test_deepspeed_stubs.py")
"""They compare with the sources of the versions in ``constraints.txt``."""

VERSIONS = """
import json
from requestzero.environment.machine import installed_versions
print(json.dumps(installed_versions()))
"""


@dataclass(frozen=True)
class Environment:
    """A Python and its variables, and a folder for what runs in it."""

    python: str
    variables: dict[str, str]
    folder: Path

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run this Python in the checkout; ``options`` are those of ``subprocess.run``."""
        environment = {**os.environ, **self.variables}
        return subprocess.run([self.python, *arguments], cwd=ROOT, env=environment, text=True, **options)

    def output(self, *arguments: str, allowed: tuple[int, ...] = (0,)) -> str:
        """Return what it prints; end the script where its exit status is not allowed."""
        done = self.run(*arguments, capture_output=True)
        if done.returncode not in allowed:
            raise SystemExit(f"{self.folder.name}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout


def environment_of(cell: Cell, folder: Path) -> Environment:
    """Build the cell's environment in ``folder``, unless it is there."""
    place = folder / re.sub(r"[^\w.]+", "-", cell.name)
    place.mkdir(exist_ok=True)
    variables = {"TORCH_EXTENSIONS_DIR": str(place / "torch_extensions")}
    if cell.python is None:
        paths = [overlay(package, version, folder) for package, version in cell.packages.items()]
        return Environment(sys.executable, {**variables, "PYTHONPATH": os.pathsep.join([*paths, *OURS])}, place)
    if not (place / "built").exists():
        build(cell, place)
    path = os.pathsep.join([str(place / "bin"), os.environ["PATH"]])  # tests start programs by name
    variables |= {"PATH": path, "PYTHONPATH": os.pathsep.join(OURS)}
    return Environment(str(place / "bin/python"), variables, place)


def overlay(package: str, version: str, folder: Path) -> str:
    """Install one package alone into a folder of its own; return that, to be the first on the path."""
    place = folder / f"{package}-{version}"
    if not place.exists():
        part = folder / f"{place.name}.part"  # of an installation that was interrupted nothing is used
        shutil.rmtree(part, ignore_errors=True)
        pip(sys.executable, "--no-deps", "--no-build-isolation", "--target", str(part), f"{package}=={version}")
        part.rename(place)
    return str(place)


def build(cell: Cell, place: Path) -> None:
    """Make an environment with another Python: the cell's packages, and this package with its tests' needs."""
    assert cell.python is not None
    subprocess.run([interpreter(cell.python), "-m", "venv", "--clear", str(place)], check=True)
    inside, pins = str(place / "bin/python"), place / "constraints.txt"
    pins.write_text("".join(f"{package}=={version}\n" for package, version in cell.packages.items()))
    pinned = {"PIP_CONSTRAINT": str(pins)}  # in the place of the machine's own constraints
    pip(inside, "torch", *BUILD, **pinned)
    pip(inside, "--no-build-isolation", "-e", f"{ROOT}[dev]", **pinned)
    (place / "built").touch()


def interpreter(version: str) -> str:
    """Return a Python of this version that runs, which not everything of that name on the PATH does."""
    for folder in os.environ["PATH"].split(os.pathsep):
        python = shutil.which(f"python{version}", path=folder)
        if python and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    raise SystemExit(f"There is no python{version} on the PATH that runs.")


def pip(python: str, *arguments: str, **variables: str) -> None:
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **variables})


def measure(cell: Cell, environment: Environment, tests: bool) -> dict[str, Any]:
    """Run the self-test and, where wanted, the tests; return the row of the table."""
    found = json.loads(environment.output("-c", VERSIONS))
    started = time.monotonic()
    test = environment.output(
        "-m", "requestzero.doctor", "--verify", "--all", "--device", "cpu", "--json", allowed=(0, 5)
    )
    result = json.loads(test)
    outcome = "passed" if result["passed"] else "FAILED"
    outcome += "" if result["stage_3"] else ", without stage 3"
    if result["different"]:
        outcome = f"{len(result['different'])} definitions of DeepSpeed are not recorded as proved: FAILED"
    row = {
        "versions": {name.lower(): version for name, version in found.items()},
        "self_test": f"{result['wrong']} of {result['updates']} wrong, {outcome}",
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "seconds": round(time.monotonic() - started),
        "passed": result["passed"] and not result["different"],
    }
    if tests:
        outcomes = fast_tests(environment)
        row["tests"] = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items(), reverse=True))
        row["passed"] = row["passed"] and not outcomes["failed"]
    return row


def fast_tests(environment: Environment) -> Counter[str]:
    """Run the fast tests; return their number by outcome, and print those that have failed."""
    report, log = (environment.folder / name for name in ("tests.xml", "tests.log"))
    report.unlink(missing_ok=True)
    has_trl = environment.run("-c", "import trl", capture_output=True).returncode == 0  # it needs Python 3.11
    left_out = [f"--ignore={path}" for path in (*PINNED, *(() if has_trl else ("tests/trl",)))]
    options = ["-v", "--fast", "-p", "no:cacheprovider", "-p", "refusals", f"--junitxml={report}", *left_out]
    with log.open("w") as file:
        environment.run("-m", "pytest", *options, "tests", stdout=file, stderr=subprocess.STDOUT)
    if not report.exists():
        raise SystemExit(f"{environment.folder.name}: the tests have ended without a report, see {log}")
    return Counter(map(outcome_of, ElementTree.parse(report).iter("testcase")))


def outcome_of(test: ElementTree.Element) -> str:
    """Return one of the words of the table, and print a test that has failed."""
    skipped = test.find("skipped")
    if skipped is not None:
        return "for a later DeepSpeed" if skipped.get("message", "").startswith("DeepSpeed ") else "skipped"
    if test.find("failure") is None and test.find("error") is None:
        return "passed"
    if any(each.get("name") == PROPERTY for each in test.iter("property")):
        return "of what is refused"
    print(f"FAILED {test.get('classname')}::{test.get('name')}", file=sys.stderr)
    return "failed"


def table(results: dict[str, Any]) -> str:
    """Return the results as a table."""
    head = ["environment", "Python", *SHOWN, "self-test", "fast tests", "run on"]
    rows = [head, ["---"] * len(head)]
    for cell in CELLS:
        if cell.name in results:
            row = results[cell.name]
            versions = [row["versions"].get(name) or "-" for name in ("python", *SHOWN)]
            rows.append([cell.name, *versions, row["self_test"], row.get("tests", cell.tests), row["date"]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{table(results)}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="CELL", help="names of cells (default: all)")
    parser.add_argument("--tests", action="store_true", help="also the fast tests")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / ".pytest_cache/matrix", help="of the environments")
    given = parser.parse_args()
    unknown = set(given.cells) - {cell.name for cell in CELLS}
    if unknown:
        parser.error(f"no cells: {', '.join(sorted(unknown))}. There are: {', '.join(cell.name for cell in CELLS)}")
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = []
    for cell in CELLS:
        if given.cells and cell.name not in given.cells:
            continue
        row = measure(cell, environment_of(cell, folder), given.tests)
        results[cell.name] = {**results.get(cell.name, {}), **row}
        print(f"{cell.name}: {row['self_test']} ({row['seconds']} s) {row.get('tests', '')}")
        failed += [] if row["passed"] else [cell.name]
        if not given.dry:
            write(results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
