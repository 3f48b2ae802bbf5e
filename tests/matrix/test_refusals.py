"""What counts as refused in the cells of the matrix: a test's own exception, and not any text near it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from refusals import texts
from run import outcome_of

from support.paths import ROOT
from support.ranks import RankError
from support.scripts import ProgramError

PROGRAM = """
def test_refused():
    raise ValueError("Muon is not allowed with this version of DeepSpeed")

def test_failed():
    refused = "Muon is not allowed with this version of DeepSpeed"
    raise KeyError("another")

def test_passed():
    pass
"""
REFUSED = "ValueError: Muon is not allowed with this version of DeepSpeed"


def test_tests_are_counted_by_their_outcome(tmp_path: Path) -> None:
    (tmp_path / "test_program.py").write_text(PROGRAM)
    options = ["-q", "-p", "no:cacheprovider", "-p", "refusals", "--junitxml=tests.xml", "test_program.py"]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT / "strategies"), str(ROOT / "tests/matrix")])}
    subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env=os.environ | path,
        capture_output=True,
        check=False,
    )
    outcomes = [outcome_of(test) for test in ElementTree.parse(tmp_path / "tests.xml").iter("testcase")]
    assert outcomes == ["of what is refused", "failed", "passed"]


def test_of_ranks_their_own_errors_count() -> None:
    error = RankError(f"--- run on rank 0:\n# {REFUSED}\nKeyError: 'other'", ["KeyError: 'other'"])
    assert list(texts(error)) == ["KeyError: 'other'"]


def test_errors_may_be_a_method() -> None:
    """As of what pydantic raises."""

    class Invalid(ValueError):
        def errors(self) -> list[str]:
            return []

    assert list(texts(Invalid(REFUSED))) == [REFUSED]


def test_what_a_test_has_met_in_the_place_of_another_error_counts() -> None:
    with pytest.raises(AssertionError) as found, pytest.raises(ValueError, match="another text"):
        raise ValueError(REFUSED)
    assert REFUSED in list(texts(found.value))


def test_of_programs_the_errors_in_their_output_count() -> None:
    output = f"a line\nTraceback (most recent call last):\n  raise # {REFUSED}\nImportError: one\nmore of it\n\nlast"
    assert list(texts(ProgramError(output))) == ["ImportError: one\nmore of it\n"]
    assert list(texts(ProgramError("nothing"))) == ["nothing"]
