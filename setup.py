"""Only because setuptools wants `cffi_modules` from a setup() call; everything else is in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["build_ffi.py:builder"])
