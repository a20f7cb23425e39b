"""Memory borrowed from UCX: what arrived, where UCX put it, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..._util.handles import warn_resource
from .._memory.window import Window
from .teardown import Teardown
from .trio_run import TrioRun


class LendingEngine(Protocol):
    """The part of the engine that borrowed memory uses."""

    run: TrioRun
    teardown: Teardown

    @property
    def usable(self) -> bool:
        """True if UCX's worker exists, and this thread may use it."""

    def next_id(self) -> int: ...


class Borrowed:
    """A view of UCX's memory, read-only by default, which :meth:`end` releases.

    The engine knows all of them, and ends them before it destroys its worker. A worker whose memory is still in use by
    then is left alone instead: better a leak than a crash.
    """

    __slots__ = ("_engine", "_id", "_release", "_window")

    def __init__(
        self, engine: LendingEngine, address: int, length: int, release: Callable[[], None], *, writable: bool = False
    ) -> None:
        self._engine = engine
        self._release = release
        self._id = engine.next_id()
        self._window = Window(address, length, writable=writable)
        engine.teardown.children[self._id] = self.drop

    @property
    def view(self) -> memoryview:
        """See :attr:`Window.view`."""
        return self._window.view

    @property
    def ended(self) -> bool:
        return self._id not in self._engine.teardown.children

    def end(self) -> None:
        """Releases the memory; the view can be used no more. Ended already: no effect.

        Raises:
            BufferError: an object made from the view (a numpy array, another memoryview) still uses the memory.
            RuntimeError: another thread.
        """
        if self.ended:
            return
        self._engine.run.check_thread()
        self._window.close()
        del self._engine.teardown.children[self._id]
        self._engine.teardown.unreleased.discard(self._id)
        if self._engine.usable:
            self._release()

    def drop(self) -> None:
        """Gives the memory back where no caller could handle an error: memory that is in use stays borrowed."""
        try:
            self.end()
        except BufferError as error:
            if self._id not in self._engine.teardown.unreleased:
                self._engine.teardown.unreleased.add(self._id)
                warn_resource(f"memory borrowed from UCX was dropped: {error}", self)
