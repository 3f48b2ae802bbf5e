"""The directive ``flow``: steps in their order, each a line of ``name: what happens``, drawn as boxes with arrows.

Plain HTML that the style sheet lays out: side by side on a wide window, one below the other on a narrow one.
"""

from __future__ import annotations

from html import escape

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata


def html(lines: list[str], caption: str) -> str:
    """Return the flow as a figure.

    Raises:
        ValueError: a line has no colon.
    """
    boxes = []
    for line in lines:
        name, colon, text = line.partition(":")
        if not colon:
            raise ValueError(f"{line!r} in a flow must be 'name: what happens'.")
        boxes.append(f"<li><strong>{escape(name.strip())}</strong><span>{escape(text.strip())}</span></li>")
    steps = "".join(boxes)
    return f'<figure class="diagram"><ol class="flow">{steps}</ol><figcaption>{escape(caption)}</figcaption></figure>'


class Flow(SphinxDirective):
    """Draws its content; its argument is the caption."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return a figure with the boxes and its caption."""
        return [nodes.raw("", html([line for line in self.content if line.strip()], self.arguments[0]), format="html")]


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_directive("flow", Flow)
    return {"version": "1", "parallel_read_safe": True}
