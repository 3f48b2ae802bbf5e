"""The probe's table, files, figure and page, from a made-up result."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image
from rich.console import Console

from requestzero.probe.columns import SECTIONS, size
from requestzero.probe.figure import svg_text, write_figures
from requestzero.probe.files import write_csv, write_json
from requestzero.probe.page import write_page
from requestzero.probe.table import print_tables, tables
from support.made_up_result import PARTITION, made_up_result


def terminal(columns: list[str] | None = None) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_tables(console, made_up_result(columns))
    return console.export_text()


def line_of(text: str, *parts: str) -> str:
    (line,) = (line for line in text.splitlines() if all(part in line for part in parts))
    return line


def test_the_table_shows_every_engine_and_what_could_not_run() -> None:
    text = terminal(["updates"])
    assert "27 of 60" in line_of(text, "ZeRO-2 offload, bf16/fp32", "stock")
    assert "0 of 60" in line_of(text, "released", "of")
    assert "0 of 60" in line_of(text, "retained", "of")
    assert "TypeError" in line_of(text, "stock (BF16_Optimizer)")
    assert "ZeRO-1 device, bf16/fp32, stock, updates: TypeError: no <such> thing" in text


def test_memory_stands_beside_its_reference() -> None:
    text = terminal(["memory"])
    assert "2.00 KiB" in line_of(text, "retained")
    assert "2.00 KiB (x 1.00)" in line_of(text, "retained")
    assert "0 B (x 1.00)" in line_of(text, "released")


def test_times_are_ratios_with_their_spread() -> None:
    assert line_of(terminal(["times"]), "released").count("0.50 (0.40-0.70)") == 3
    assert " ms" not in terminal(["times"])


def test_columns_choose_the_sections() -> None:
    assert len(list(tables(made_up_result()))) == len(SECTIONS)
    (table,) = tables(made_up_result(["reads", "copies"]))
    titles = [column.header for column in table.columns]
    assert titles == ["configuration", "engine", "host copies", "bytes", "host reads", "reference (ratio)"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (3 * 2**40, "3,072.00 GiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_json_and_csv_agree(tmp_path: Path) -> None:
    write_json(made_up_result(), tmp_path / "a.json")
    write_csv(made_up_result(), tmp_path / "a.csv")
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    with (tmp_path / "a.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [row["retain"] for row in rows] == [None, False, True, "auto", None]
    for row, line in zip(rows, lines, strict=True):
        for name, value in row.items():
            if not isinstance(value, list):
                assert line[name] == ("" if value is None else str(value))
    assert rows[1]["memory"] == [PARTITION, 0, PARTITION, PARTITION, 0, 0]
    assert rows[4]["updates_error"] == "TypeError: no <such> thing"


def test_the_figure_is_a_png_and_an_svg_with_its_text(tmp_path: Path) -> None:
    png, svg = write_figures(made_up_result(), tmp_path)
    assert Image.open(png).size[0] > 1000
    texts = "".join(ElementTree.parse(svg).getroot().itertext())
    for text in (
        "Wrong parameter updates of 60",
        "stock DeepSpeed 0.19.8",
        "27",
        "released",
        "retained",
        "stock",
        "[MiB]",
        "boundary backward",
        "ratio: median and quartiles",
    ):
        assert text in texts


def test_the_figure_leaves_out_what_was_not_measured(tmp_path: Path) -> None:
    result = made_up_result()
    for row in result.rows:
        row.values = {name: value for name, value in row.values.items() if "ratio" not in name}
    assert "boundary backward" not in svg_text(result)
    for row in result.rows:
        row.values.pop("memory", None)
    assert "Wrong parameter updates" in svg_text(result)
    for row in result.rows:
        row.values.pop("wrong_updates", None)
    assert svg_text(result) == ""
    assert write_figures(result, tmp_path) == []


def test_the_page_needs_nothing_beside_it_and_escapes(tmp_path: Path) -> None:
    write_page(made_up_result(), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 1
    assert "src=" not in page
    assert "<link" not in page
    assert "TypeError: no &lt;such&gt; thing" in page
    assert "A &lt;fast&gt; one" in page
    assert "27 of 60" in page
    assert "not installed" in page
    for section in SECTIONS:
        assert section.title.replace("'", "&#39;") in page
