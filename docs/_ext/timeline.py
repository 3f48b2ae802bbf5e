"""The directive ``timeline``: micro-batches, requests and update windows, drawn from one line of text.

    a1 a2 | b1 | c1 c2 c3 || d1 d2 |

``|`` ends a request, ``||`` ends one and is followed by the step. The name of a request is the first letter of its
micro-batches. The SVG lies within the page and has its colours from the theme.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

CELL, GAP, LEFT, ROW = 54, 6, 112, 34
ROWS = ("request", "micro-batch", "", "update window")


@dataclass(frozen=True)
class Span:
    """Micro-batches ``first`` to ``last`` that make a request or a window, and whether it is complete."""

    name: str
    first: int
    last: int
    complete: bool = True


def read(text: str) -> tuple[list[str], list[Span], list[Span]]:
    """Return the micro-batches, requests and windows of a timeline.

    Raises:
        ValueError: a mark ends nothing.
    """
    cells: list[str] = []
    requests: list[Span] = []
    windows: list[Span] = []
    for word in text.split():
        if word not in ("|", "||"):
            cells.append(word)
            continue
        begin = requests[-1].last + 1 if requests else 0
        if begin == len(cells):
            raise ValueError(f"{word!r} ends no request in the timeline {text!r}.")
        requests.append(Span(cells[begin][0], begin, len(cells) - 1))
        if word == "||":
            first = windows[-1].last + 1 if windows else 0
            windows.append(Span("", first, len(cells) - 1))
    first = windows[-1].last + 1 if windows else 0
    if first < len(cells):
        windows.append(Span("", first, len(cells) - 1, complete=False))
    return cells, requests, windows


def svg(text: str, caption: str) -> str:
    """Return the timeline as an ``<svg>`` element."""
    cells, requests, windows = read(text)
    width, height = LEFT + len(cells) * CELL + 60, len(ROWS) * ROW + 8
    parts = [_label(row, name) for row, name in enumerate(ROWS)]
    parts += [_box(0, span.first, span.last, span.name, "request") for span in requests]
    parts += [_box(1, place, place, name, "micro") for place, name in enumerate(cells)]
    parts += [_mark(span.last, "step()" if _ends(windows, span.last) else "end") for span in requests]
    for span in windows:
        name = "one update" if span.complete else "the next"
        parts.append(_box(3, span.first, span.last, name, "window" if span.complete else "window open"))
    return (
        f'<svg class="timeline" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(caption)}">{"".join(parts)}</svg>'
    )


def _ends(windows: list[Span], place: int) -> bool:
    return any(window.complete and window.last == place for window in windows)


def _label(row: int, name: str) -> str:
    return f'<text x="0" y="{row * ROW + 21}">{name}</text>'


def _box(row: int, first: int, last: int, name: str, kind: str) -> str:
    x, width = LEFT + first * CELL, (last - first + 1) * CELL - GAP
    middle = x + width / 2
    return (
        f'<g class="{kind}"><rect x="{x}" y="{row * ROW + 4}" width="{width}" height="{ROW - 10}" rx="4"/>'
        f'<text x="{middle}" y="{row * ROW + 21}" text-anchor="middle">{escape(name)}</text></g>'
    )


def _mark(place: int, name: str) -> str:
    x, y = LEFT + (place + 1) * CELL - GAP / 2, 2 * ROW
    kind = "step" if name == "step()" else "end"
    bottom = 3 * ROW + 4 if kind == "step" else y + 8
    anchor, shift = ("start", 6) if kind == "step" else ("middle", 0)
    return (
        f'<g class="{kind}"><line x1="{x}" y1="4" x2="{x}" y2="{bottom}"/>'
        f'<text x="{x + shift}" y="{y + 22}" text-anchor="{anchor}">{name}</text></g>'
    )


class Timeline(SphinxDirective):
    """Draws the one line that is its content; its argument is the caption."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return a figure with the drawing and its caption."""
        caption = self.arguments[0]
        drawing = svg(" ".join(self.content), caption)
        html = f'<figure class="diagram">{drawing}<figcaption>{escape(caption)}</figcaption></figure>'
        return [nodes.raw("", html, format="html")]


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_directive("timeline", Timeline)
    return {"version": "1", "parallel_read_safe": True}
