"""The result as one HTML page that needs nothing beside it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from requestzero.probe.columns import cell_of, chosen_sections, engine_text, notes
from requestzero.probe.figure import svg_text
from requestzero.probe.result import Result

_TEMPLATE = "page.html.jinja"


def write_page(result: Result, path: Path) -> None:
    """Write the tables with the meaning of their columns, the figure, versions and machine."""
    environment = Environment(
        loader=PackageLoader("requestzero.probe", "."),
        autoescape=select_autoescape(["html", "jinja"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(_TEMPLATE).render(
        sections=list(chosen_sections(result.options["columns"])),
        groups=[(str(key), list(rows)) for key, rows in groupby(result.rows, key=lambda row: row.configuration)],
        cell_of=cell_of,
        engine_text=engine_text,
        notes=notes(result.rows),
        figure=Markup(svg_text(result)),
        machine=result.machine.rows(),
        options=result.options,
        parameters=result.rows[0].values["parameters"],
        tensors=result.rows[0].values["tensors"],
    )
    path.write_text(page, encoding="utf-8")
