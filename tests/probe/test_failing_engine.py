"""An engine that cannot run a configuration: its row says so, and the other engines are measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from requestzero.probe import measure
from requestzero.probe.grid import STOCK, Configuration, Engine
from requestzero.probe.options import Options, parse
from requestzero.probe.result import Row

TIMED: list[list[Engine]] = []


@pytest.fixture
def stock_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def updates(configuration: Configuration, engine: Engine, options: Options) -> dict[str, int]:
        if engine == STOCK:
            raise KeyError("no gradient")
        return {"updates": 5, "wrong_updates": 0}

    def times(configuration: Configuration, engines: list[Engine], *_: Any) -> dict[Engine, dict[str, list[float]]]:
        TIMED.append(engines)
        return {engine: {part: [0.2, 0.4] for part in measure.PARTS} for engine in engines}

    def gather(by_rank: list[Any], mine: Any) -> None:
        by_rank[:] = [mine] * len(by_rank)

    ranks = SimpleNamespace(get_world_size=lambda: 2, all_gather_object=gather)
    monkeypatch.setattr(measure, "dist", ranks)
    monkeypatch.setattr(measure, "measure_times", times)
    monkeypatch.setitem(measure._MEASUREMENTS, "updates", updates)


def measured(*arguments: str) -> tuple[list[Row], list[str], Options]:
    reports: list[str] = []
    columns = ("--columns", "updates", "times", "--layers", "1", "--width", "4")
    options = parse(["--device", "cpu", "--only", "ZeRO-2 offload, bf16/fp32", *columns, *arguments])
    return measure.measure_all(options, reports.append), reports, options


@pytest.mark.usefixtures("stock_fails")
def test_the_others_go_on_without_a_ratio() -> None:
    rows, reports, options = measured()
    assert rows[0].errors == {"updates": "KeyError: 'no gradient'", "times": "KeyError: 'no gradient'"}
    assert "wrong_updates" not in rows[0].values
    for row in rows[1:]:
        assert not row.errors
        assert row.values["wrong_updates"] == 0
        assert not [name for name in row.values if "step" in name], "nothing to divide by, and no bare times on a CPU"
    assert [[Engine(True, retain) for retain in (False, True, "auto")]] == TIMED
    assert len(reports) == options.steps()
