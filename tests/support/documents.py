"""The documentation as text: its pages, and the code blocks in them with what they say of how they are run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = (README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))

# A comment on the line before the block: "run: HOW" or "not run: WHY".
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>(?:not )?run: [^\n]+) -->\n)?```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A Python block of a page."""

    place: str
    """Page and line, such as ``docs/guides/engine.md:9``."""
    mark: str | None
    """``run: torchrun 1``, ``not run: an excerpt``, ...; ``None`` where the block has no mark."""
    code: str


def python_blocks() -> list[Block]:
    """Return the Python blocks of all pages."""
    return [block for page in PAGES for block in blocks_of(page.read_text(encoding="utf-8"), _name(page))]


def blocks_of(text: str, name: str) -> list[Block]:
    """Return the Python blocks of one page."""
    return [
        Block(f"{name}:{text.count(chr(10), 0, match.start('code'))}", match["mark"], match["code"])
        for match in _BLOCK.finditer(text)
    ]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))
