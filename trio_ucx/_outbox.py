"""Small messages that wait for each other, to go as one. Pure.

Handing a message to UCX costs several times as much as making it ready, a system call over TCP. So when small messages
follow each other closely, only the first goes at once; the others are put together to a *batch*, a message that the
receiver's C code takes apart (``tag_inbox.c``). ``ucp/_loop_hooks.py`` says when it goes at the latest.

A batch consists of runs: a head (lane, length of each message, their number), then the messages, one after the other.
"""

from __future__ import annotations

from . import _wire as wire

#: Longer ones go by themselves.
LONGEST_MESSAGE = 1024
_MOST_IN_A_RUN = 2**16 - 1


class Outbox:
    """The small messages of one connection that have not gone yet."""

    __slots__ = ("_count", "_head", "_lane", "_length", "_size", "parts")

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        #: Empty when nothing waits; else what will be joined.
        self.parts: list[bytes] = []
        self._size = 0
        # The run that goes on, and where its head goes.
        self._lane = -1
        self._length = self._count = self._head = 0

    def add(self, lane: int, data: bytes) -> bool:
        """Adds a message of up to LONGEST_MESSAGE. Whether it is time to :meth:`take`, as another may find no room."""
        if lane != self._lane or len(data) != self._length or self._count == _MOST_IN_A_RUN:
            self._end_run()
            self._lane = lane
            self._length = len(data)
            self._count = 0
            self._head = len(self.parts)
            self.parts.append(b"")
            self._size += wire.RUN_HEAD.size
        self.parts.append(data)
        self._count += 1
        self._size += self._length
        return self._size > wire.MAX_BATCH - wire.RUN_HEAD.size - LONGEST_MESSAGE

    def _end_run(self) -> None:
        if self.parts:
            self.parts[self._head] = wire.RUN_HEAD.pack(self._lane, self._length, self._count)

    def take(self) -> bytes:
        """The batch of all that was added."""
        self._end_run()
        batch = b"".join(self.parts)
        self._begin()
        return batch
