"""Memory as a memoryview that can be taken back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..._native import ffi


def in_use() -> BufferError:
    return BufferError(
        "this memory is still in use: drop what was made from it (arrays, other memoryviews) before it is released"
    )


class Window:
    """Memory as a memoryview that can be taken back, unless something else looks through it.

    A memoryview that is released knows of the arrays made from it, but not of its slices, or of other memoryviews made
    from it: those go on. What they all share is the object that exports the memory: nobody looks when that is gone.
    """

    __slots__ = ("_address", "_closed", "_exporter", "_length", "_view", "_writable")

    def __init__(self, address: int, length: int, *, writable: bool) -> None:
        self._address = address
        self._length = length
        self._writable = writable
        self._closed = False
        self._exporter: Callable[[], Any] = lambda: None  # a weak reference
        self._view = self._look()

    def _look(self) -> memoryview:
        exporter = self._exporter()
        if exporter is None:
            exporter = ffi.buffer(ffi.cast("char *", self._address), self._length)
            self._exporter = weakref.ref(exporter)
        view = memoryview(exporter)
        return view if self._writable else view.toreadonly()

    @property
    def view(self) -> memoryview:
        """Returns one memoryview, made again if the user has released it; a released one once the window is closed."""
        try:
            _ = self._view.nbytes
        except ValueError:
            if not self._closed:
                self._view = self._look()
        return self._view

    def close(self) -> None:
        """Ends the view.

        Raises:
            BufferError: something made from it is in use.
        """
        try:
            self._view.release()
        except BufferError:
            raise in_use() from None
        if self._exporter() is not None:
            raise in_use()
        self._closed = True
