"""What the documentation says of the package: commands, errors, metrics and exit codes, compared with their owners."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from requestzero import errors
from requestzero.doctor.status import Status
from support.documents import DOCS, PAGES, README
from support.paths import ROOT

_LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def first_cells(text: str) -> list[str]:
    """Return the first cell of every row of the tables in a text, headings included."""
    return re.findall(r"^\| (?!-)(.*?) \|", text, flags=re.MULTILINE)


def test_the_readme_is_short() -> None:
    assert 150 <= len(README.read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    targets = _LINK.findall(page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("name", ["make demo", "make probe", "make test", "make docs"])
def test_the_commands_exist(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert name in README.read_text(encoding="utf-8")
    assert re.search(rf"^{name.split()[1]}:", makefile, flags=re.MULTILINE)


def test_every_error_stands_with_cause_and_remedy() -> None:
    types = {
        value.__name__
        for value in vars(errors).values()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    sections = dict(part.split("\n", 1) for part in text_of("reference/errors.md").split("\n## ")[1:])
    assert set(sections) - {"Other errors"} == types
    for name in types:
        assert {"cause", "where", "afterwards", "remedy"} <= set(first_cells(sections[name]))


def test_every_metric_is_listed() -> None:
    from requestzero.zero import metrics

    names = re.findall(r'"((?:overflow/|requests/)?[a-z_]+)":', inspect.getsource(metrics.logged_metrics))
    listed = [cell.strip("`") for cell in first_cells(text_of("reference/metrics.md"))]
    assert sorted(listed) == sorted(["metric", *names])


def test_the_exit_codes_of_the_doctor_are_listed() -> None:
    section = text_of("reference/exit-codes.md").split("## Doctor")[1].split("\n## ")[0]
    wrong_arguments = "2"
    assert set(first_cells(section)) == {"exit status", wrong_arguments, *(str(int(status)) for status in Status)}
