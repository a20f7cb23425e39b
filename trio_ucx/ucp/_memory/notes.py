"""Notifications: what peers say about memory of ours, after they have written to it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ..._util.handles import OpenedNotConstructed


@attrs.frozen(eq=False)
class Note:
    """A notification, by a peer's :meth:`RemoteMemory.notify` or ``BlockPlan.put(..., notify=)``.

    Attributes:
        data: what the peer said.
    """

    data: bytes
    _find_endpoint: Callable[[], Any] = attrs.field(repr=False)

    @property
    def endpoint(self) -> Any:
        """Our endpoint to the sender, as :attr:`ActiveMessage.reply_endpoint`; None if there is none any more."""
        return self._find_endpoint()


class NoteQueue:
    """The notifications about one memory that nobody has taken, and who waits for one. Any thread may use it."""

    def __init__(self) -> None:
        self._notes: deque[Note] = deque()
        self._waiting: list[tuple[trio.lowlevel.TrioToken, trio.Event]] = []
        self._lock = threading.Lock()
        self.closed = False

    def add(self, note: Note) -> None:
        with self._lock:
            self._notes.append(note)
            self._wake()

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._notes.clear()
            self._wake()

    def _wake(self) -> None:
        """Wakes all who wait: the first one takes the notification."""
        waiting, self._waiting = self._waiting, []
        for token, event in waiting:
            try:
                token.run_sync_soon(event.set)
            except trio.RunFinishedError:
                pass

    def take(self) -> Note | trio.Event:
        """Returns the next notification, or an event to wait for before the next attempt.

        Raises:
            trio.ClosedResourceError: the memory was closed.
        """
        with self._lock:
            if self.closed:
                raise trio.ClosedResourceError("this memory was closed")
            if self._notes:
                return self._notes.popleft()
            event = trio.Event()
            self._waiting.append((trio.lowlevel.current_trio_token(), event))
            return event

    def forget(self, event: trio.Event) -> None:
        """Removes an event for which nobody waits any more."""
        with self._lock:
            self._waiting = [(token, each) for token, each in self._waiting if each is not event]


@attrs.define(eq=False, repr=False)
class Notifications(metaclass=OpenedNotConstructed):
    """The notifications about a memory, by :meth:`Memory.notifications`: ``async for note in memory.notifications()``.

    At most 1,024 wait to be received; then the senders wait. Several tasks may receive: each notification goes to one.

    Cancellation: no notification is lost.
    """

    _queue: NoteQueue
    _taken: Callable[[], None]

    def __aiter__(self) -> Notifications:
        return self

    async def __anext__(self) -> Note:
        return await self.receive()

    @enable_ki_protection
    async def receive(self) -> Note:
        """Waits for the next notification.

        Cancellation: no notification is lost.

        Raises:
            trio.ClosedResourceError: the memory was closed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            found = self._queue.take()
            if isinstance(found, Note):
                self._taken()
                await trio.lowlevel.cancel_shielded_checkpoint()
                return found
            try:
                await found.wait()
            finally:
                self._queue.forget(found)
