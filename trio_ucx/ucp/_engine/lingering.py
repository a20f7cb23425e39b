"""Endpoints over TCP that linger: UCX's endpoint is closed a moment after its user closed it, or its peer has gone.

That of an attempt to connect that was given up lingers, too (``_handshake/handshake.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

import attrs
import trio

from .pending import Pending, Signal

#: Seconds that an endpoint lingers whose peer has closed, aborted or vanished: with little under way, and with much.
AFTER_PEER, AFTER_PEER_WITH_MUCH = 1.0, 5.0
#: Seconds in which an operation has to end of an endpoint that is closed here first; and how long it lingers at most.
#: Shorter, so that the two sides do not close at once.
BEFORE_PEER, MOST_BEFORE_PEER = 0.5, 3.0
#: Seconds for which an endpoint lingers whose peer has gone, and whose sockets do not take what UCX has to write: the
#: network is down. The kernel gives up before (``tcp_retries2``), and UCX then says that the endpoint has failed.
MOST_UNSENT = 1200.0
#: So many bytes, or fewer, find room in the sockets' buffers.
MUCH = 2**21
#: When one more lingers, the oldest is closed at once.
MAX_LINGERING = 256


class ClosedEndpoint(Protocol):
    """An endpoint that its user has closed."""

    @property
    def pending(self) -> Collection[object]:
        """Its operations that have not ended."""

    def begin_flush(self, handle: Any) -> Pending | None:
        """Begins a flush, which ends when the sockets have taken what UCX has to write.

        Returns:
            None: they have, or it could not begin.
        """

    def close_native(self, handle: Any) -> None:
        """Closes UCX's endpoint by force."""


@attrs.define
class _Entry:
    #: UCX's endpoint.
    handle: Any
    #: When it is closed.
    closes: float
    #: The latest time for that, if it is closed as soon as nothing is under way.
    latest: float | None
    #: Whether request chains have requests in flight. They are not in ``pending``, so a flush tells when they are
    #: written.
    chain_requests: bool
    flush: Pending | None = None


class Lingering:
    """UCX's endpoints that nobody uses any more, and that are closed by force a moment later.

    Args:
        progress: progresses the worker after one was closed.

    UCX 1.22 sometimes frees a TCP endpoint while it handles an event of it, and the process crashes: when both sides
    close by force at the same moment, or one does with more to write than the sockets hold. So the side that closes
    first goes on until all its operations have ended, or none has ended for BEFORE_PEER, and the side that learns of
    that waits for longer. While the network is down nothing can be written, and when it is back, both sides would learn
    of it in the same moment: so that side also waits until everything is written.
    """

    def __init__(self, progress: Callable[[], None]) -> None:
        self._progress = progress
        #: In the order in which they were added.
        self._endpoints: dict[ClosedEndpoint, _Entry] = {}
        self._ended: list[Signal] = []

    async def wait_ended(self) -> None:
        """Waits until none lingers, except for those that only wait for the network."""
        while due := [entry.closes for entry in self._endpoints.values() if entry.closes > time.monotonic()]:
            ended = Signal()
            self._ended.append(ended)
            with trio.move_on_after(min(due) - time.monotonic()):
                await ended.wait()
            self.close_due()

    def __bool__(self) -> bool:
        return bool(self._endpoints)

    @property
    def drains(self) -> bool:
        """Whether one of them goes on until its operations have ended."""
        return any(entry.latest is not None for entry in self._endpoints.values())

    def add(
        self, core: ClosedEndpoint, handle: Any, seconds: float, *, until_drained: bool, chain_requests: bool
    ) -> None:
        now = time.monotonic()
        latest = now + MOST_BEFORE_PEER if until_drained else None
        self._endpoints[core] = _Entry(handle, now + seconds, latest, chain_requests)
        if len(self._endpoints) > MAX_LINGERING:
            self.close_one(next(iter(self._endpoints)))

    def close_one(self, core: ClosedEndpoint) -> None:
        """Closes one now. If it does not linger: no effect."""
        if core in self._endpoints:
            core.close_native(self._endpoints.pop(core).handle)
            self._progress()
            while not self._endpoints and self._ended:
                self._ended.pop().set()

    def operation_ended(self, core: ClosedEndpoint) -> None:
        """One of its operations has ended."""
        entry = self._endpoints.get(core)
        if entry is None or entry.latest is None:
            return
        if core.pending or entry.chain_requests:
            entry.closes = min(time.monotonic() + BEFORE_PEER, entry.latest)
        else:
            self.close_one(core)

    def close_due(self) -> None:
        """Closes those whose time is over."""
        now = time.monotonic()
        for core, entry in list(self._endpoints.items()):
            if entry.closes <= now and not self._waits_for_flush(core, entry, now):
                self.close_one(core)  # it may be closed already: closing one may end another

    def _waits_for_flush(self, core: ClosedEndpoint, entry: _Entry, now: float) -> bool:
        """Whether its close waits for a flush, which this begins if need be."""
        if core not in self._endpoints or (entry.latest is not None and not entry.chain_requests):
            return False
        latest = entry.closes + MOST_UNSENT if entry.latest is None else entry.latest
        if entry.flush is None:
            entry.flush = core.begin_flush(entry.handle)
            if entry.flush is not None:
                entry.flush.notify = lambda _: self.close_due()
        return entry.flush is not None and entry.flush.outcome is None and now <= latest

    def close_all(self) -> None:
        for core in list(self._endpoints):
            self.close_one(core)
