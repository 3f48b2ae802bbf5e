"""Tables of Markdown, as the documentation has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first heading may be empty."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines) + "\n"


def write_sections(path: str, sections: Sequence[tuple[str, str]]) -> None:
    """Write titled sections into a file, whose folder is made if it is missing."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(f"## {title}\n\n{body}" for title, body in sections), encoding="utf-8")
