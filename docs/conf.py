"""The site: ``python -m sphinx -W -n docs build/site``."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import tempfile
import zlib
from importlib.metadata import version as version_of
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

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


def compressed_inventory(name: str, folder: str) -> str:
    """The names that we refer to, for builds without the Internet: docs/inventories has them as text."""
    header = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n# The rest is compressed with zlib.\n"
    lines = (Path(__file__).parent / "inventories" / f"{name}.txt").read_bytes()
    file = Path(folder) / f"{name}.inv"
    file.write_bytes(header.encode() + zlib.compress(lines))
    return str(file)


inventories = tempfile.TemporaryDirectory()
intersphinx_mapping = {
    name: (address, (None, compressed_inventory(name, inventories.name))) for name, address in OTHERS.items()
}
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


class Public(SphinxDirective):
    """Shows public names of a module: ``{public} MODULE``, and the names, or all of them if none is given."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        module = importlib.import_module(self.arguments[0])
        names = " ".join(self.content).split() or module.__all__
        lines = ["```{eval-rst}", *(line for name in names for line in self.shown(module, name)), "```"]
        return self.parse_text_to_nodes("\n".join(lines))

    def shown(self, module: ModuleType, name: str) -> list[str]:
        thing, qualified = getattr(module, name), f"{module.__name__}.{name}"
        if not inspect.isclass(thing):
            return [f".. auto{'function' if inspect.isroutine(thing) else 'data'}:: {qualified}", ""]
        lines = [f".. autoclass:: {qualified}", "   :members:", "   :show-inheritance:"]
        ours = [base for base in thing.__mro__[1:] if base.__module__.startswith("trio_ucx")]
        if any(not member.startswith("_") for base in ours for member in vars(base)):
            others = [base.__name__ for base in thing.__mro__ if not base.__module__.startswith("trio_ucx")]
            lines.append(f"   :inherited-members: {', '.join(others)}")
        described = "Attributes:" in (thing.__doc__ or "")
        if not described and (issubclass(thing, enum.Enum | dict) or attrs.has(thing)):
            lines.append("   :undoc-members:")
        return [*lines, ""]


def show_file_names(app: Any, document: str, source: list[str]) -> None:
    """Gives each block that the reader writes to a file the name of the file as its caption."""
    source[0] = re.sub(r"<!-- file: (.*?) -->\n+```(\w+)\n", r"```{code-block} \2\n:caption: \1\n\n", source[0])


def setup(app: Any) -> None:
    app.add_directive("public", Public)
    app.connect("source-read", show_file_names)
    app.connect("autodoc-process-docstring", split_attributes, priority=900)
    app.connect("autodoc-process-signature", public_signature)
