"""How Sphinx builds these pages: ``make docs``."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes

import mpidist

project = "mpidist"
author = "the mpidist authors"
release = version = mpidist.__version__

extensions = [
    *("myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.napoleon"),
    *("sphinx_copybutton", "sphinx_design"),
]
#: Names of other libraries in docstrings.  Their own inventories would be fetched at each build; these are files.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "inventories/python.inv"),
    "numpy": ("https://numpy.org/doc/stable", "inventories/numpy.inv"),
    "torch": ("https://docs.pytorch.org/docs/stable", "inventories/torch.inv"),
}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"mpidist {release}"
html_logo = html_favicon = "_static/logo.svg"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2466b0", "color-brand-content": "#2466b0"},
    "dark_css_variables": {"color-brand-primary": "#78b0f0", "color-brand-content": "#78b0f0"},
}
# What is copied of a terminal are the commands, without prompts and output.
copybutton_exclude = ".linenos, .gp, .go"

# `name` in a docstring is a name of Python, linked where the reference has it.
default_role = "py:obj"

# Docstrings give types and shapes in words; signatures stay short.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
# Attributes that are properties too are described once.
napoleon_use_ivar = True
napoleon_use_rtype = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3


def setup(app: Any) -> None:
    app.connect("doctree-read", _add_dark_pictures, priority=400)  # before images are collected, at 500
    app.connect("html-page-context", _let_names_wrap)
    app.connect("autodoc-process-docstring", _qualify_types, priority=400)  # before napoleon, at 500


def _qualify_types(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Say which `Topology` and which `dtype` a docstring means: there are several of each."""
    of_mesh = name.startswith(("mpidist.tpu.", "mpidist.strategies.tpu."))
    topology = "mpidist.tpu.experimental.Topology" if of_mesh else "mpidist.cluster.topology.Topology"
    for number, line in enumerate(lines):
        line = re.sub(r" : (?:Mesh)?Topology\b", f" : {topology}", line)
        lines[number] = re.sub(r" : dtype\b", " : numpy.dtype", line)


def _add_dark_pictures(app: Any, doctree: Any) -> None:
    """Put the dark picture beside each light one; the theme shows the one that fits."""
    for light in list(doctree.findall(nodes.image)):
        if light["uri"].endswith("-light.svg"):
            dark = light.deepcopy()
            dark["uri"] = light["uri"].replace("-light.svg", "-dark.svg")
            light["classes"].append("only-light")
            dark["classes"].append("only-dark")
            light.parent.insert(light.parent.index(light) + 1, dark)


#: Where a name may be cut: `mpidist.|Mirrored|Strategy`, `MPIDIST_|TIMEOUT_|SECONDS`.
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=\w[._/(=,])(?=\w)")
_NAME = re.compile(r'(?<=<span class="pre">)[^<]+|(?<=<h[1-6]>)[^<]+')
_CONSOLE = re.compile(r'(?<=<div class="highlight-console).*?(?=</pre>)', re.DOTALL)
#: An option or an arrow, which a browser would cut after the hyphen: `--mpi`, `->`.
_OPTION = re.compile(r"(?<![^\s>])-(?:&gt;|[^\s<&]+)")
_INLINE_OPTION = re.compile(r'(?<=<span class="pre">)--?\w[\w-]*(?:=(?:<wbr>)?\w{1,6}(?=<))?')
_TOGETHER = r'<span class="option">\g<0></span>'
#: A line of output with columns.
_COLUMNS = re.compile(r'(?<=<span class="go)(?=">(?:[^<\n]*?\S {2,}){3}\S)')


def _let_names_wrap(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Let lines be cut between the words of a name, and not within an option; what is copied stays the same."""
    for place, key in ((context, "body"), (context.get("prev"), "title"), (context.get("next"), "title")):
        if place and key in place:
            text = place[key] if key == "body" else f"<h1>{place[key]}"
            text = _NAME.sub(lambda name: _WORDS.sub("<wbr>", name[0]), text)
            text = _INLINE_OPTION.sub(_TOGETHER, text)
            place[key] = _CONSOLE.sub(_keep_together, text).removeprefix("" if key == "body" else "<h1>")


def _keep_together(console: re.Match[str]) -> str:
    return _COLUMNS.sub(" columns", _OPTION.sub(_TOGETHER, console[0]))
