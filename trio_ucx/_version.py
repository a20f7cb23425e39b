"""The version, in one place that both the package and its hellos can import."""

from importlib.metadata import version

__version__ = version("trio_ucx")
