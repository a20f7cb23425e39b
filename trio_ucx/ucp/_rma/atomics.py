"""How many of UCX's own atomics may be under way on an atomics endpoint (``_rma/remote_memory.py``).

UCX ends the process when an endpoint or a worker goes that has atomics which it could not send yet ("'abort' is not
implemented for protocol amo/fetch/sw"). So there are never more under way than surely fit into a shared-memory queue.

Over TCP there is one at a time. UCX there ends the *owner's* process when it cannot send the answer to an atomic
because the client has died (ucp_request_try_send): of two answers, the second. To one, the kernel says nothing.

One that fetches is over when its answer comes; one that does not, when a flush has told that it happened.
"""

from __future__ import annotations

from ..._native import lib
from .._engine.engine import Engine
from .._engine.operations import EndpointCore, Operation
from .._engine.pending import Waiters

#: A queue of UCX's in shared memory has 256 places.
LIMIT = 64
LIMIT_OVER_TCP = 1


class AtomicWindow:
    """The places for atomics under way, and the tasks that wait for one."""

    def __init__(self, core: EndpointCore, limit: int) -> None:
        self._core = core
        self._free = limit
        #: So many that do not fetch are flushed together.
        self._together = max(1, limit // 2)
        self._waiters = Waiters()
        #: How many hold a place until a flush.
        self._unflushed = 0

    async def enter(self) -> None:
        """Waits for a place. No checkpoint if there is one."""
        if self._free > 0 and not self._waiters:
            self._free -= 1
        else:
            await self._waiters.wait(self._core.engine.waiting)

    def leave(self, places: int = 1) -> None:
        for _ in range(places):
            if not self._waiters.give(None):
                self._free += 1

    def sent(self) -> None:
        """One that does not fetch was sent; it holds its place until a flush."""
        self._unflushed += 1
        if self._unflushed >= self._together and self._core.handle is not None:
            places, self._unflushed = self._unflushed, 0
            engine = self._core.engine
            verdict = lib.tu_endpoint_flush(self._core.handle)
            if verdict > 0:
                _Flush(self, places, engine, verdict)
                engine.progress()
            else:
                self.leave(places)

    def fail(self, error: Exception) -> None:
        self._waiters.fail(error)


class _Flush(Operation):
    """Gives places back. Nobody waits for it."""

    __slots__ = ("_places", "_window")

    def __init__(self, window: AtomicWindow, places: int, engine: Engine, id: int) -> None:
        super().__init__(engine, id, None, "flushing atomics", window._core)
        self._window = window
        self._places = places

    def release(self) -> None:
        super().release()
        self._window.leave(self._places)
