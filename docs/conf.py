"""Sphinx's configuration: ``make docs`` builds ``docs/_build/html``. Nothing is loaded from the network."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))
sys.path.insert(0, str(HERE.parent / "strategies"))

from requestzero import __version__  # noqa: E402

project = "requestzero"
author = "The requestzero developers"
copyright = f"2026, {author}"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "attribute_docstrings",
    "options_reference",
    "timeline",
    "flow",
]
exclude_patterns = ["_build", "**/_*.md"]  # parts of other pages

# Links to headings ([text](page.md#heading)) are checked by the build, which fails on every warning.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures stand in the source; the text names types and units
napoleon_google_docstring = True
napoleon_use_rtype = False

# Every reference must lead somewhere, except to what other projects document and to what is not public here.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|nn|deepspeed|lightning|accelerate|transformers|omegaconf|collections)\..*"),
    (r"py:.*", r"requestzero\.(data\.\w+|planning|zero\.metrics|lightning)(\..*)?"),
]

html_theme = "pydata_sphinx_theme"
html_title = "requestzero"
html_static_path = ["_static"]
html_sidebars = {page: [] for page in ("index", "troubleshooting", "benchmarks", "contributing")}
html_css_files = ["requestzero.css"]
html_show_sourcelink = False
html_theme_options = {
    "header_links_before_dropdown": 8,
    "navbar_align": "left",
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": True,
    "show_toc_level": 2,
}

copybutton_exclude = ".linenos, .gp, .go"
