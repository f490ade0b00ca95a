"""Sphinx: ``make docs`` writes build/docs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

# Sentences with a colon: what stands before it would be taken for a type.
GoogleDocstring._parse_attribute_docstring = lambda self: self._consume_to_end()  # type: ignore[method-assign]

project = "liger_dist"
author = "the liger_dist authors"
copyright = "the liger_dist authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["examples"]
html_theme = "furo"
html_title = "liger_dist"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
copybutton_prompt_text = "$ "


def add_toctrees(app: Sphinx, page: str, source: list[str]) -> None:
    """Adds a hidden toctree for each list of links on the index, plain Markdown on a repository page."""
    if page != "index":
        return
    for caption, links in re.findall(r"^## (.+)\n\n((?:- .+\n)+)", source[0], re.MULTILINE):
        pages = "\n".join(re.findall(r"\]\(([\w/]+)\.\w+\)$", links, re.MULTILINE))
        source[0] += f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n:maxdepth: 1\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_toctrees)
