"""Memory that UCX lends: what arrived, where UCX put it, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .._native import ffi
from ._util import warn_resource

if TYPE_CHECKING:
    from ._engine import Engine


class Loan:
    """A view of memory of UCX's, read-only by default, which goes back to it by :meth:`end`.

    The engine knows all loans and ends them before it destroys its worker. A worker whose memory somebody still looks
    at by then is left alone instead: better a leak than a crash.
    """

    __slots__ = ("_engine", "_give_back", "_id", "view")

    def __init__(
        self, engine: Engine, address: int, length: int, give_back: Callable[[], None], *, writable: bool = False
    ) -> None:
        self._engine = engine
        self._give_back = give_back
        self._id = engine.next_id()
        view = memoryview(ffi.buffer(ffi.cast("char *", address), length))
        self.view = view if writable else view.toreadonly()
        engine.children[self._id] = self.drop

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
        try:
            self.view.release()
        except BufferError:
            raise BufferError(
                "this memory is still in use: drop what was made from it (numpy arrays, other memoryviews) before it "
                "is released"
            ) from None
        del self._engine.children[self._id]
        if self._engine.usable:
            self._give_back()

    def drop(self) -> None:
        """The same where nobody could take the error: what is in use stays lent."""
        try:
            self.end()
        except BufferError as error:
            self._engine.overdue.append(self)
            warn_resource(f"memory that UCX lent was dropped: {error}", self)
