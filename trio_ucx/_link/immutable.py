"""Copies of what the user may change before it is sent."""

from __future__ import annotations

from typing import Any

from ..ucp._internal_api import Buffer, Pinned

#: The most mutable data that `send_nowait` copies.
NOWAIT_COPY_LIMIT = 2**20


def immutable(data: Buffer) -> Buffer:
    """Returns the same bytes in objects that nobody will change."""
    budget = NOWAIT_COPY_LIMIT

    def copy(part: Any, pinned: Any) -> bytes:
        nonlocal budget
        if isinstance(part, bytes):
            return part
        pins = Pinned(pinned)
        try:
            budget -= pins.size
            if budget < 0:
                raise ValueError(
                    f"send_nowait copies at most {NOWAIT_COPY_LIMIT} bytes of mutable data: use send, which does not "
                    "copy, or bytes"
                )
            return pins.copy(pins.size)
        finally:
            pins.release()

    if isinstance(data, (list, tuple)):
        return [copy(part, [part]) for part in data]  # a list, so that what must not be in one is refused
    return copy(data, data)
