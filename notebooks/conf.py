"""Settings of the guide: `make guide` builds it into `notebooks/_build/html`, offline; pages are executed once and cached."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]

import reference_pages  # noqa: E402

import sim  # noqa: E402

reference_pages.write(FOLDER / "reference")

project = "decodesim"
author = "The decodesim authors"
release = version = sim.__version__
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx-mathjax-offline"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
default_role = "code"
autodoc_typehints = "none"  # signatures have them
autodoc_member_order = "bysource"
napoleon_numpy_docstring = True

# Stored outputs are what readers see; a build runs nothing, and tests run every page (tests/project/test_notebooks.py).
nb_execution_mode = "off"
nb_merge_streams = True

html_theme = "pydata_sphinx_theme"
html_title = "decodesim"
html_theme_options = {"navigation_depth": 2, "show_toc_level": 2, "show_prev_next": True}
html_static_path: list[str] = []
suppress_warnings = ["myst.xref_missing", "mystnb.unknown_mime_type"]
