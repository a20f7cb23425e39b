"""Memory that UCX lends: what arrived, where UCX put it, without a copy."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..._native import ffi
from .._util import warn_resource

if TYPE_CHECKING:
    from .engine import Engine


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
        """The same one each time, unless somebody released it meanwhile. After the end a released one."""
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


class Borrowed:
    """A view of memory of UCX's, read-only by default, which goes back to it by :meth:`end`.

    The engine knows all of them, and ends them before it destroys its worker. A worker whose memory is still in use by
    then is left alone instead: better a leak than a crash.
    """

    __slots__ = ("_engine", "_give_back", "_id", "_window")

    def __init__(
        self, engine: Engine, address: int, length: int, give_back: Callable[[], None], *, writable: bool = False
    ) -> None:
        self._engine = engine
        self._give_back = give_back
        self._id = engine.next_id()
        self._window = Window(address, length, writable=writable)
        engine.children[self._id] = self.drop

    @property
    def view(self) -> memoryview:
        """See :attr:`Window.view`."""
        return self._window.view

    @property
    def ended(self) -> bool:
        return self._id not in self._engine.children

    def end(self) -> None:
        """Gives the memory back; the view can be used no more. Ended already: no effect.

        Raises:
            BufferError: an object made from the view (a numpy array, another memoryview) still uses the memory.
        """
        if self.ended:
            return
        self._window.close()
        del self._engine.children[self._id]
        if self._engine.usable:
            self._give_back()

    def drop(self) -> None:
        """The same where nobody could take the error: what is in use stays lent."""
        try:
            self.end()
        except BufferError as error:
            if self not in self._engine.overdue:
                self._engine.overdue.append(self)
                warn_resource(f"memory that UCX lent was dropped: {error}", self)
