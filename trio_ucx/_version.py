"""The version, in one place that both the package and its hellos can import."""

from importlib.metadata import version

from ._native import ucx

__version__ = version("trio_ucx")
#: What this side runs, for peers and reports.
SOFTWARE = f"trio_ucx {__version__}, UCX {ucx.release}"
