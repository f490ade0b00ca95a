"""Sphinx: ``make docs`` writes build/docs."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
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
exclude_patterns = ["examples", "_templates"]
html_theme = "furo"
metadata = configparser.ConfigParser()
metadata.read(ROOT / "setup.cfg")
urls = dict(line.split(" = ") for line in metadata["metadata"]["project_urls"].split("\n") if line)
tags = subprocess.run(["git", "tag", "--list", "v*", "--sort=-v:refname"], cwd=ROOT, capture_output=True, text=True)
release = subprocess.run(["git", "describe", "--tags", "--always"], cwd=ROOT, capture_output=True, text=True).stdout
html_title = f"liger_dist {release.strip()}"
html_theme_options = {
    "source_repository": metadata["metadata"]["url"],
    "source_branch": "main",
    "source_directory": "docs/",
}
html_context = {"site": urls["Documentation"], "tags_of_releases": tags.stdout.split()}
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        *(f"sidebar/{part}.html" for part in ("brand", "search", "scroll-start", "navigation")),
        "versions.html",
        "sidebar/scroll-end.html",
    ]
}
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
