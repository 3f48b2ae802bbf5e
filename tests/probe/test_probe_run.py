"""The command itself, small: two ranks, two configurations. What it finds, and that everything it writes agrees."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.scripts import finish, start_module

pytestmark = pytest.mark.slow

PARAMETERS = 2 * 32 * 32
PARTITION = 4 * PARAMETERS // 2
COMMAND = (
    *("--device", "cpu", "--ranks", "2", "--layers", "2", "--width", "32", "--windows", "4", "--requests", "3"),
    *("--timed-windows", "2", "--only", "offload, bf16/fp32"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output directory, and what was printed."""
    out = tmp_path_factory.mktemp("probe")
    process = start_module("requestzero.probe", *COMMAND, "--out", str(out), "--html", str(out / "page.html"))
    return out, finish(process)


@pytest.fixture(scope="module")
def rows(run: tuple[Path, str]) -> list[dict[str, Any]]:
    return json.loads((run[0] / "probe.json").read_text())["rows"]


def of(rows: list[dict[str, Any]], stage: int, engine: str, retain: bool | str | None = None) -> dict[str, Any]:
    (row,) = (r for r in rows if (r["stage"], r["engine"], r["retain"]) == (stage, engine, retain))
    return row


def test_nothing_failed(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 8 + 2
    assert not [key for row in rows for key in row if key.endswith("_error")]


def test_stage_3(rows: list[dict[str, Any]]) -> None:
    """Its sum is on the host all the time, so that no partition is released; the bucket has the model's size."""
    stock, ours = of(rows, 3, "stock"), of(rows, 3, "requestzero")
    assert 0 < stock["wrong_updates"] < stock["updates"]
    assert ours["wrong_updates"] == ours["precision"] == 0
    bucket = 2 * PARAMETERS
    for row in (stock, ours):
        assert row["bytes_between_requests"] == row["bytes_between_requests_reference"] == bucket
        assert row["host_reads_backward"] == row["host_reads_backward_reference"] == 0
    assert (stock["bytes_to_host"], ours["bytes_to_host"], ours["bytes_from_host"]) == (PARTITION, 0, 0)


@pytest.mark.parametrize("stage", [1, 2])
def test_stock_is_wrong_and_requestzero_is_not(rows: list[dict[str, Any]], stage: int) -> None:
    assert 0 < of(rows, stage, "stock")["wrong_updates"] < of(rows, stage, "stock")["updates"] == 4 * 5
    for retain in (False, True, "auto"):
        assert of(rows, stage, "requestzero", retain)["wrong_updates"] == 0
        assert of(rows, stage, "requestzero", retain)["precision"] == 0
    assert (of(rows, stage, "stock")["precision"] > 1e-3) == (stage == 1)


def test_a_released_partition_is_not_held_between_requests(rows: list[dict[str, Any]]) -> None:
    released, retained = (of(rows, 2, "requestzero", retain) for retain in (False, True))
    assert released["bytes_between_requests"] == 0
    assert all(row["bytes_at_peak"] >= max(row["memory"]) for row in rows)
    for row in (retained, of(rows, 2, "stock")):
        assert row["bytes_between_requests"] == row["bytes_between_requests_reference"] == PARTITION
    # Micro-batches 2, 5 and 6 end a request.
    assert released["memory"] == [PARTITION, 0, PARTITION, PARTITION, 0, 0]


@pytest.mark.parametrize("stage", [1, 2])
def test_host_reads_and_what_moves(rows: list[dict[str, Any]], stage: int) -> None:
    stock, released, retained = (
        of(rows, stage, *which) for which in (("stock",), ("requestzero", False), ("requestzero", True))
    )
    assert stock["host_reads_backward"] == stock["host_reads_backward_reference"] == 1
    assert released["host_reads_backward"] == retained["host_reads_backward"] == 0
    assert released["bytes_to_host"] == retained["bytes_to_host"] == stock["bytes_to_host"] == PARTITION
    assert (released["bytes_from_host"], retained["bytes_from_host"]) == (PARTITION, 0)


def test_times_are_ratios_only(rows: list[dict[str, Any]]) -> None:
    assert not [key for row in rows for key in row if "seconds" in key]
    for row in rows:
        if row["engine"] == "requestzero":
            assert all(row[f"{part}_ratio"] > 0 for part in ("backward", "boundary", "step"))


def test_everything_that_is_written_agrees(run: tuple[Path, str], rows: list[dict[str, Any]]) -> None:
    out, printed = run
    with (out / "probe.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    for row, line in zip(rows, lines, strict=True):
        for name, value in row.items():
            if not isinstance(value, list):
                assert line[name] == ("" if value is None else str(value))
    Image.open(out / "probe.png").verify()
    assert (out / "probe.svg").read_text().count("</svg>") == 1
    page = (out / "page.html").read_text()
    assert "<svg" in page
    for row in rows:
        shown = f"{row['wrong_updates']} of {row['updates']}"
        assert shown in printed
        assert f"<td>{shown}</td>" in page
    assert {path.name for path in out.iterdir()} == {"probe.json", "probe.csv", "probe.png", "probe.svg", "page.html"}
