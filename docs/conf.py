"""How Sphinx builds these pages: ``make docs``."""

from __future__ import annotations

import mpidist

project = "mpidist"
author = "the mpidist authors"
release = version = mpidist.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"mpidist {release}"

# `name` in a docstring is a name of Python, linked where the reference has it.
default_role = "py:obj"

# Docstrings give types and shapes in words; signatures stay short.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
# Attributes that are properties too are described once.
napoleon_use_ivar = True
napoleon_use_rtype = False

myst_heading_anchors = 3
