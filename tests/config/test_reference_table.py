"""The README's table of options is the one that the settings give."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from requestzero.config.options import OverflowSettings, RequestZeROSettings
from requestzero.config.reference_table import BEGIN, END, main, meanings_of, options_table, with_options_table
from support.paths import README


def test_every_option_has_a_docstring() -> None:
    for owner in (RequestZeROSettings, OverflowSettings):
        assert set(meanings_of(owner)) == {option.name for option in fields(owner)}


def test_the_readme_holds_the_present_table() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == with_options_table(text), "The options changed: run `make docs`."


def test_the_table_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert capsys.readouterr().out == options_table() + "\n"
    document = tmp_path / "page.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    main([str(document)])
    assert document.read_text() == f"before\n{BEGIN}\n{options_table()}\n{END}\nafter\n"


@pytest.mark.parametrize("document", ["", BEGIN, f"{BEGIN}{END}{END}"])
def test_a_document_without_its_markers_is_refused(document: str) -> None:
    with pytest.raises(ValueError, match="must hold each of these lines once"):
        with_options_table(document)
