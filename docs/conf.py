"""The site: ``python -m sphinx -W -n docs build/site``."""

from __future__ import annotations

import re
import tempfile
import zlib
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from trio_ucx._util.handles import OpenedNotConstructed

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
exclude_patterns = ["explanation/ucx-reports"]
nitpicky = True
#: Private bases of public classes, and what is private in annotations.
nitpick_ignore_regex = [
    ("py:(class|data)", r"trio_ucx\.(\w+\.)*_.*|prometheus_client\.registry\.Collector"),
    ("py:class", r"Status|OnFalse|Sizes|Host|SupportsBuffer|SupportsDLPack|collections\.abc\.Mapping\[str"),
]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

OTHERS = {
    "python": "https://docs.python.org/3",
    "trio": "https://trio.readthedocs.io/en/stable",
    "numpy": "https://numpy.org/doc/stable",
    "outcome": "https://outcome.readthedocs.io/en/stable",
    "anyio": "https://anyio.readthedocs.io/en/stable",
}


def compressed_inventory(name: str) -> str:
    """The names that we refer to, for builds without the Internet: docs/inventories has them as text."""
    header = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n# The rest is compressed with zlib.\n"
    lines = (Path(__file__).parent / "inventories" / f"{name}.txt").read_bytes()
    file = Path(tempfile.gettempdir()) / f"trio_ucx-{name}.inv"
    file.write_bytes(header.encode() + zlib.compress(lines))
    return str(file)


intersphinx_mapping = {name: (address, (None, compressed_inventory(name))) for name, address in OTHERS.items()}
intersphinx_timeout = 10

maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_type_aliases = {
    "Buffer": "trio_ucx.Buffer",
    "WritableBuffer": "trio_ucx.WritableBuffer",
    "Contiguous": "trio_ucx.ucp.Contiguous",
    "WritableContiguous": "trio_ucx.ucp.WritableContiguous",
}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "trio_ucx"
copybutton_exclude = ".linenos, .gp, .go"


def public_signature(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Leaves out constructors that users do not call, and names aliases of types, for which Sphinx writes a repr."""
    if what == "class":
        fields = getattr(thing, "__attrs_attrs__", ())
        if isinstance(thing, OpenedNotConstructed) or any(field.name.startswith("_") for field in fields):
            return "", None
    shown = [text and re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"~\1", text) for text in (signature, returned)]
    return shown[0], shown[1]


def split_attributes(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Gives each of several attributes that share a description an anchor of its own."""
    for number, line in enumerate(lines):
        if line.startswith(directive := ".. attribute:: ") and ", " in line:
            lines[number] = line.replace(", ", "\n" + " " * len(directive))
    lines[:] = "\n".join(lines).split("\n")


def show_file_names(app: Any, document: str, source: list[str]) -> None:
    """Gives each block that the reader writes to a file the name of the file as its caption."""
    source[0] = re.sub(r"<!-- file: (.*?) -->\n+```(\w+)\n", r"```{code-block} \2\n:caption: \1\n\n", source[0])


def setup(app: Any) -> None:
    app.connect("source-read", show_file_names)
    app.connect("autodoc-process-docstring", split_attributes, priority=900)
    app.connect("autodoc-process-signature", public_signature)
