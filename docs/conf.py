"""The site: ``python -m sphinx -W -n docs build/site``."""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "trio_ucx"
author = "The trio_ucx authors"
copyright = f"2026, {author}"
version = release = version_of("trio_ucx")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinxcontrib_trio",
    "sphinxcontrib.mermaid",
    "sphinx_copybutton",
]
nitpicky = True
exclude_patterns = ["explanation/ucx-reports"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "trio": ("https://trio.readthedocs.io/en/stable", None),
    "numpy": ("https://numpy.org/doc/stable", None),
    "outcome": ("https://outcome.readthedocs.io/en/stable", None),
    "anyio": ("https://anyio.readthedocs.io/en/stable", None),
}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "trio_ucx"
copybutton_exclude = ".linenos, .gp, .go"
