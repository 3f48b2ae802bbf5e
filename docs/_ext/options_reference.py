"""The directive ``options-table``: the options, from the classes that declare them."""

from __future__ import annotations

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

from requestzero.config.reference_table import options_table


class OptionsTable(SphinxDirective):
    """Parses the Markdown table in the place of the directive."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        lines = options_table().splitlines()
        return self.parse_text_to_nodes(StringList(lines, source="requestzero.config.options"))


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_directive("options-table", OptionsTable)
    return {"version": "1", "parallel_read_safe": True}
