"""Sphinx: ``make docs`` writes build/docs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

project = "liger_dist"
author = "the liger_dist authors"
copyright = "the liger_dist authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["examples"]
html_theme = "furo"
html_title = "liger_dist"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
copybutton_prompt_text = "$ "
