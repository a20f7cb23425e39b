"""Batches: small messages that follow each other closely are sent as one. Pure.

Handing a message to UCX costs several times as much as preparing it, over TCP a system call. So when small messages
follow each other closely, only the first is sent at once; the others are collected into a *batch*, a message that the
receiver's C code takes apart (``tag_inbox.c``). A batch is sent when it is full, or before Trio sleeps. After
``DEFER_SECONDS`` (``ucp/_engine/arming.py``), the next message or the next round of Trio's loop sends it.

A batch consists of groups of packed messages: a head (tag queue, length of each message, their number), then the
messages, one after the other. A control frame is a group of its own.
"""

from __future__ import annotations

from . import wire

_MOST_IN_A_GROUP = 2**16 - 1
#: A batch of more bytes has no room for another group with a small message.
_FULL = wire.MAX_BATCH - wire.PACKED_HEAD.size - wire.SMALL_MESSAGE


class Batch:
    """The small messages of one connection that were not sent yet."""

    __slots__ = ("_count", "_head", "_length", "_queue", "_size", "parts")

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        #: The heads and the messages, in order. Empty when nothing waits.
        self.parts: list[bytes] = []
        self._size = 0
        # The last group, and where its head belongs.
        self._queue = -1
        self._length = self._count = self._head = 0

    def add(self, queue: int, data: bytes) -> bool:
        """Adds a small message, or a control frame. Returns True if it must be taken now: another may find no room."""
        if (
            queue != self._queue
            or len(data) != self._length
            or self._count == _MOST_IN_A_GROUP
            or queue == wire.CONTROL
        ):
            self._end_group()
            self._queue = queue
            self._length = len(data)
            self._count = 0
            self._head = len(self.parts)
            self.parts.append(b"")
            self._size += wire.PACKED_HEAD.size
        self.parts.append(data)
        self._count += 1
        self._size += self._length
        return self._size > _FULL

    def _end_group(self) -> None:
        if self.parts:
            self.parts[self._head] = wire.PACKED_HEAD.pack(self._queue, self._length, self._count)

    def take(self) -> list[bytes]:
        """The parts of a batch of all that was added; the next one is empty."""
        self._end_group()
        parts = self.parts
        self._begin()
        return parts
