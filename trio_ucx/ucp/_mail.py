"""The messages of Connections: tag messages that the engine takes off UCX's hands, for whoever has the mailbox."""

from __future__ import annotations

import collections
import logging
from typing import TYPE_CHECKING, Protocol

from .._native import ffi, lib
from ._operations import ReceiveOperation

if TYPE_CHECKING:
    from ._engine import Engine
    from ._status import UCXError

logger = logging.getLogger("trio_ucx")

#: Tags with this bit set are Connections' messages, on a worker that has Connections: conn ids have it.
CONNECTION_BIT = 1 << 63


class Mailbox(Protocol):
    """Takes the messages of one connection."""

    def message_came(self, lane: int, handle: int, length: int) -> None:
        """A message arrived, and is UCX's until it is received."""

    def run_came(self, lane: int, count: int, length: int, data: bytes) -> None:
        """So many small messages of the same length arrived; none: one that had promised to be small was not."""

    def queue_stopped(self, error: UCXError) -> None:
        """Nothing will arrive over shared memory any more. (Endpoints that use it have failed already.)"""

    def internal_error(self, error: BaseException) -> None:
        """An exception in our own code, delivering to it: the connection ends, and no other. Never raises."""


class Mail:
    """Where the messages of one worker's Connections go."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: What takes the messages of a connection id, while it is open.
        self.boxes: dict[int, Mailbox] = {}
        #: Whether such messages come here.
        self.claimed = False
        #: The least sizes from which on messages stay with their senders, and how many connections have each.
        self._thresholds: collections.Counter[int] = collections.Counter()
        self._warned = False
        self._arena = memoryview(ffi.buffer(lib.tu_worker_arena(engine.handle), lib.TU_ARENA))

    def claim(self) -> None:
        """From now on, such messages come here."""
        self.claimed = True
        lib.tu_worker_claim_messages(self._engine.handle, CONNECTION_BIT, self.small)

    @property
    def small(self) -> int:
        """Up to how many bytes they are received as they come."""
        return min([lib.TU_SMALL_MESSAGE + 1, *self._thresholds]) - 1

    def expect_rendezvous(self, threshold: int) -> None:
        """The peer of a connection keeps messages from so many bytes on until they are received; 0: no messages."""
        if 0 < threshold <= lib.TU_SMALL_MESSAGE:
            self._thresholds[threshold] += 1
            self.claim()

    def forget_rendezvous(self, threshold: int) -> None:
        """That connection is closed."""
        if 0 < threshold <= lib.TU_SMALL_MESSAGE:
            self._thresholds -= collections.Counter({threshold: 1})
            if self._engine.handle is not None:
                self.claim()

    def received(self, place: int, size: int) -> bytes:
        """The bytes of a run that was received there."""
        return self._arena[place : place + size].tobytes()

    def nobodys(self, tag: int, message: int) -> None:
        """Throws away a message of a connection that is closed; or one of others', on a worker where nobody asks."""
        if not tag & CONNECTION_BIT and not self._warned:
            self._warned = True
            logger.warning(
                "tag messages that belong to no Connection are dropped (tag %#x was the first): nobody has asked for "
                "such on this worker. Call tag_receive or tag_probe before they come, or use another worker for them",
                tag,
            )
        self.discard(message)

    def discard(self, message: int) -> None:
        """Takes a message off UCX's hands and throws it away."""
        engine = self._engine
        verdict = lib.tu_message_receive_one(engine.handle, message, ffi.NULL, 0, lib.TU_MEMORY_HOST, engine.received)
        if verdict > 0:
            ReceiveOperation(engine, verdict, None, "discarding a message").leave_over()
