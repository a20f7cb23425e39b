"""For PyInstaller: where the hook is that adds UCX to a frozen program (an entry point in pyproject.toml)."""

from __future__ import annotations

import os


def hook_dirs() -> list[str]:
    """Returns the folders with hooks."""
    return [os.path.dirname(__file__)]
