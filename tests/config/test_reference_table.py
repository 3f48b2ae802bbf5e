"""The reference's table of options is the one that the classes that declare them give."""

from __future__ import annotations

from dataclasses import fields

import pytest

from requestzero.config.option_record import options_of
from requestzero.config.options import OWNERS, OverflowSettings, RequestZeROSettings
from requestzero.config.reference_table import main, meanings_of, options_sections, options_table


def test_every_option_has_a_docstring() -> None:
    for owner in (RequestZeROSettings, OverflowSettings):
        assert set(meanings_of(owner)) == {option.name for option in fields(owner)}


def test_the_table_has_every_option_and_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    table = options_table()
    assert capsys.readouterr().out == table + "\n"
    options = [option.path for owner in OWNERS for option in options_of(owner).values()]
    assert [row.split("`")[1] for row in table.splitlines()[2:]] == options


def test_every_option_has_a_section() -> None:
    text = options_sections()
    for owner in OWNERS:
        for name, option in options_of(owner).items():
            section = text.split(f"## `{option.path}`\n")[1].split("\n## ")[0]
            assert meanings_of(owner)[name].replace("``", "`") in section
            assert "- default: " in section
            assert "- DeepSpeed key: " in section
