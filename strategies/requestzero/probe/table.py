"""The result on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from requestzero.probe.columns import cell_of, chosen_sections, engine_text, notes
from requestzero.probe.result import Result


def print_tables(console: Console, result: Result) -> None:
    """Print one table a section, then errors in full."""
    for table in tables(result):
        console.print(table)
    console.print(f"stock: DeepSpeed {result.machine.versions['deepspeed']}", markup=False, highlight=False)
    for note in notes(result.rows):
        console.print(note, markup=False, highlight=False)


def tables(result: Result) -> Iterator[Table]:
    """Return the tables, with a row for every engine; the configuration stands at its first one."""
    for section, columns in chosen_sections(result.options["columns"]):
        table = Table(title=section.title, title_justify="left")
        table.add_column("configuration", no_wrap=True)
        table.add_column("engine", no_wrap=True)
        for column in columns:
            table.add_column(column.title, justify="right")
        before = None
        for row in result.rows:
            first = row.configuration != before
            if first and before is not None:
                table.add_section()
            before = row.configuration
            cells = [str(row.configuration) if first else "", engine_text(row)]
            table.add_row(*map(Text, [*cells, *(cell_of(column, row) for column in columns)]))
        yield table
