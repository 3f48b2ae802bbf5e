"""A panel of the figure: wrong parameter updates of stock DeepSpeed and of requestzero."""

from __future__ import annotations

from typing import Any

from matplotlib.patches import Patch

from requestzero.probe.result import Result, Row

_WRONG, _RIGHT = "#c9503c", "#2f6fde"
_HEIGHT = 0.38


def updates_rows(result: Result) -> list[tuple[Row | None, Row]]:
    """Return stock's row, ``None`` where it could not run, and requestzero's worst one, by configuration."""
    by_configuration: dict[str, list[Row]] = {}
    for row in result.rows:
        if "wrong_updates" in row.values:
            by_configuration.setdefault(str(row.configuration), []).append(row)
    pairs = []
    for rows in by_configuration.values():
        ours = [row for row in rows if row.engine.requestzero]
        if ours:
            stock = next((row for row in rows if not row.engine.requestzero), None)
            pairs.append((stock, max(ours, key=_wrong)))
    return pairs


def draw_updates(axes: Any, result: Result) -> None:
    """Draw two bars for each configuration, with their numbers."""
    pairs = updates_rows(result)
    total = max(row.values["updates"] for _, row in pairs)
    for place, (stock, ours) in enumerate(pairs):
        if stock is not None:
            _bar(axes, place - _HEIGHT / 2, _wrong(stock), _WRONG, total)
        _bar(axes, place + _HEIGHT / 2, _wrong(ours), _RIGHT, total)
    axes.set_yticks(range(len(pairs)), [str(ours.configuration) for _, ours in pairs])
    axes.grid(axis="y", visible=False)
    machine = result.machine
    axes.set_title(f"Wrong parameter updates of {total}\n{machine.ranks} ranks on {machine.accelerator.upper()}")
    axes.set_xlabel("updates that differ in any bit from the exact sum of their window")
    axes.set_xlim(0, total)
    axes.set_ylim(len(pairs) - 0.4, -1.3)  # room for the legend
    names = {f"stock DeepSpeed {machine.versions['deepspeed']}": _WRONG, "requestzero": _RIGHT}
    handles = [Patch(color=colour, label=name) for name, colour in names.items()]
    axes.legend(handles=handles, loc="upper center", ncols=len(names))


def _bar(axes: Any, place: float, wrong: int, colour: str, total: int) -> None:
    axes.barh(place, wrong, _HEIGHT, color=colour)
    axes.text(wrong + total / 100, place, str(wrong), va="center", color=colour)


def _wrong(row: Row) -> int:
    return int(row.values["wrong_updates"])
