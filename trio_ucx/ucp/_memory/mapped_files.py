"""Refuses buffers in mapped files that have been truncated: where the file has ended, there is no memory.

An access is a SIGBUS, over shared memory also at the peer. Over TCP the kernel refuses to send it, and UCX then
fails the endpoint, with all its connections. A file that is truncated later, during the transfer, still has these
effects, as it has on whatever else reads the mapping.
"""

from __future__ import annotations

import mmap
from typing import Any

from ..._native import lib

#: Views of views that are followed: numpy and memoryview make no chains.
_DEEPEST = 8


def is_mapped(data: Any) -> bool:
    """True if an object is an mmap, or a view of one, or may be: DLPack does not say."""
    for _ in range(_DEEPEST):
        if data is None or isinstance(data, mmap.mmap):
            break
        if type(data).__name__ == "PyCapsule":
            return True
        data = data.obj if type(data) is memoryview else getattr(data, "base", None)
    return isinstance(data, mmap.mmap)


def check_backed(data: Any, last: Any) -> None:
    """Refuses an object if this process cannot read its last byte, a cffi pointer.

    Raises:
        ValueError: it cannot.
    """
    if not lib.tu_can_read(last):
        raise ValueError(
            f"cannot use this {type(data).__name__}: the file that it maps was truncated, and ends before it"
        )
