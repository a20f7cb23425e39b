"""Utilities that have nothing to do with UCX, for all layers. They import nothing else of trio_ucx."""
