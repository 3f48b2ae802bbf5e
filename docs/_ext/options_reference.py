"""The directive ``options-reference``: a section for each option, from the classes that declare them."""

from __future__ import annotations

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

from requestzero.config.reference_table import options_sections


class OptionsReference(SphinxDirective):
    """Parses the Markdown sections in the place of the directive."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        lines = options_sections().splitlines()
        text = StringList(lines, source="requestzero.config.options")
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_directive("options-reference", OptionsReference)
    return {"version": "1", "parallel_read_safe": True}
