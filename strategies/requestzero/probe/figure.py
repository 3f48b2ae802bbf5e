"""The result as a figure: wrong updates, memory over the micro-batches of a window, and times as ratios to stock."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from requestzero.probe.memory import request_sizes
from requestzero.probe.result import Result, Row
from requestzero.probe.timing import PARTS
from requestzero.probe.updates_panel import draw_updates, updates_rows

_COLOURS = {
    "stock": "#b9bec8",
    "requestzero": "#2f6fde",
    "released": "#2f6fde",
    "retained": "#e8893a",
    "auto": "#3a9a5b",
}
_LINE_WIDTHS = {"stock": 8, "retained": 4.5}  # broad, so that lines of the same height are seen on them
_PART_COLOURS = dict(zip(PARTS, ("#a9c4f5", "#2f6fde", "#173a78"), strict=True))
_PART_NAMES = {"backward": "backward", "boundary": "boundary backward", "step": "step"}
_STYLE: Any = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e6ea",
    "axes.axisbelow": True,
    "legend.edgecolor": "none",
    "legend.framealpha": 1,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "requestzero",  # the same result gives the same file
}


def write_figures(result: Result, folder: Path) -> list[Path]:
    """Write ``probe.png`` and ``probe.svg``; neither if neither updates nor memory nor times were measured."""
    if not _panels(result):
        return []
    paths = [folder / "probe.png", folder / "probe.svg"]
    with rc_context(_STYLE):
        figure = make_figure(result)
        figure.savefig(paths[0], dpi=160)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def svg_text(result: Result) -> str:
    """Return the figure as an ``<svg>`` element; empty where there is nothing to draw."""
    if not _panels(result):
        return ""
    file = io.StringIO()
    with rc_context(_STYLE):
        make_figure(result).savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()[file.getvalue().index("<svg") :]


def _panels(result: Result) -> list[str]:
    has = {
        "updates": bool(updates_rows(result)),
        "memory": bool(_memory_rows(result)),
        "times": bool(_timed_rows(result)),
    }
    return [name for name, present in has.items() if present]


def _memory_rows(result: Result) -> list[Row]:
    """Return the rows of one configuration, preferably of the highest stage with a partition that can be released."""
    rows = [row for row in result.rows if "memory" in row.values]
    if not rows:
        return []
    chosen = max(rows, key=lambda row: (row.configuration.has_host_copy, row.configuration.stage)).configuration
    return [row for row in rows if row.configuration == chosen]


def _timed_rows(result: Result) -> list[Row]:
    return [row for row in result.rows if "step_ratio" in row.values]


def make_figure(result: Result) -> Figure:
    """Draw a panel for each of updates, memory and times that was measured, side by side."""
    panels = _panels(result)
    height = max(3.8, 1.6 + 0.42 * max(len(_timed_rows(result)), len(updates_rows(result))))
    figure = Figure(figsize=(6.2 * len(panels), height), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        {"updates": draw_updates, "memory": _draw_memory, "times": _draw_times}[panel](axes, result)
    return figure


def _draw_memory(axes: Any, result: Result) -> None:
    rows = _memory_rows(result)
    for row in rows:
        mib = [count / 2**20 for count in row.values["memory"]]
        width = _LINE_WIDTHS.get(str(row.engine), 2)
        colour, name = _COLOURS.get(str(row.engine)), str(row.engine)
        axes.plot(range(1, len(mib) + 1), mib, "o-", linewidth=width, markersize=5, color=colour, label=name, zorder=2)
    _mark_requests(axes, request_sizes(result.options["requests"]))
    held = "allocated on the GPU" if result.options["device"] == "cuda" else "held by gradients"
    axes.set_title(f"Memory over one window\n{rows[0].configuration}, {_ranks(result)}")
    axes.set_xlabel("micro-batch (dotted: end of a request)")
    axes.set_ylabel(f"{held} on a rank, after the backward [MiB]")
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.22)  # room for the legend
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper center", ncols=len(rows))


def _mark_requests(axes: Any, sizes: list[int]) -> None:
    end = 0
    for size in sizes:
        end += size
        axes.axvline(end, color="#b6bac2", linestyle=":", linewidth=1.2, zorder=1)


def _draw_times(axes: Any, result: Result) -> None:
    rows = _timed_rows(result)
    height = 0.8 / len(PARTS)
    for number, part in enumerate(PARTS):
        middle = [row.values[f"{part}_ratio"] for row in rows]
        low = [row.values[f"{part}_ratio"] - row.values[f"{part}_ratio_low"] for row in rows]
        high = [row.values[f"{part}_ratio_high"] - row.values[f"{part}_ratio"] for row in rows]
        axes.barh(
            [i + (number - 1) * height for i in range(len(rows))],
            middle,
            height,
            xerr=(low, high),
            error_kw={"elinewidth": 0.9, "ecolor": "#4a4f58"},
            color=_PART_COLOURS[part],
            label=_PART_NAMES[part],
        )
    axes.axvline(1, color="#4a4f58", linestyle="--", linewidth=1.2)
    axes.set_yticks(range(len(rows)), [_bar_name(row) for row in rows])
    axes.grid(axis="y", visible=False)
    stock = f"stock DeepSpeed {result.machine.versions['deepspeed']}"
    axes.set_title(f"Time, requestzero / stock (dashed: {stock})\n{_ranks(result)}")
    axes.set_xlabel("ratio: median and quartiles (shorter is faster)")
    axes.set_ylim(len(rows) - 0.4, -1.3)  # room for the legend
    axes.legend(loc="upper center", ncols=len(PARTS))


def _bar_name(row: Row) -> str:
    engine = "" if row.engine.retain is None else f", {row.engine}"
    return f"{row.configuration}{engine}"


def _ranks(result: Result) -> str:
    machine = result.machine
    return f"{machine.ranks} {'rank' if machine.ranks == 1 else 'ranks'} on {machine.accelerator.upper()}"
