"""What a listener prints about its clients."""

from __future__ import annotations

from contextlib import suppress
from typing import TextIO


def log_line(text: str, file: TextIO) -> None:
    """Prints a line, if it can be written: a full disk or a closed pipe does not end the listener."""
    with suppress(OSError):
        print(text, file=file, flush=True)
