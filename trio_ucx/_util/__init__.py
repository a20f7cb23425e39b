"""Utilities that have nothing to do with UCX, for all layers. They import each other only."""
