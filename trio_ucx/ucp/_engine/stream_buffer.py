"""What an endpoint has received of its UCP stream, in borrowed pieces, until a task takes it."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from ..._native import lib
from .._memory.buffers import Pinned
from .._memory.window import in_use
from .borrowed import Borrowed, LendingEngine
from .waits import Signal, Waiting


class StreamingEngine(LendingEngine, Protocol):
    """The part of the engine that the stream of an endpoint uses."""

    handle: Any
    waiting: Waiting


class StreamChunk:
    """A part of the stream: borrowed memory of UCX's, or bytes that were put back."""

    __slots__ = ("_part", "_start", "borrowed")

    def __init__(self, what: Borrowed | bytes) -> None:
        self.borrowed = what if isinstance(what, Borrowed) else None
        self._start = 0
        #: What is left of it once a part was taken.
        self._part = memoryview(what) if isinstance(what, bytes) else None

    @property
    def view(self) -> memoryview:
        if self._part is not None:
            return self._part
        assert self.borrowed is not None
        return self.borrowed.view

    def skip(self, count: int) -> None:
        """Forgets the first bytes."""
        self._part = self.view[count:]
        self._start += count

    def end(self) -> None:
        """Releases the memory of this piece. Ended already: no effect.

        Raises:
            BufferError: see :meth:`Borrowed.end`.
        """
        if self._part is not None:
            try:
                self._part.release()
            except BufferError:
                raise in_use() from None
        if self.borrowed is not None:
            try:
                self.borrowed.end()
            except BufferError:
                if self._part is not None:
                    self._part = self.borrowed.view[self._start :]
                raise


class StreamBuffer:
    """The unread part of a stream. Whatever is taken and not used can be put back."""

    __slots__ = ("_engine", "_id", "_pieces", "_waiter", "size")

    def __init__(self, engine: StreamingEngine) -> None:
        self._engine = engine
        self._id = engine.next_id()
        self._pieces: deque[StreamChunk] = deque()
        self._waiter: Signal | None = None
        #: Unread bytes.
        self.size = 0
        engine.teardown.children[self._id] = self.discard  # before its borrowed buffers are ended one by one

    def arrived(self, address: int, length: int) -> None:
        engine = self._engine
        borrowed = Borrowed(engine, address, length, lambda: lib.tu_stream_release(engine.handle, address))
        self._pieces.append(StreamChunk(borrowed))
        self.size += length
        self.wake()

    @property
    def awaited(self) -> bool:
        """True if a task waits for more."""
        return self._waiter is not None

    def wake(self) -> None:
        if self._waiter is not None:
            self._waiter.set()

    async def wait(self) -> None:
        """Waits until something arrives or :meth:`wake` is called. Cancelling it loses nothing."""
        self._waiter = Signal()
        try:
            await self._engine.waiting.wait(self._waiter)
        finally:
            self._waiter = None

    def take(self) -> StreamChunk:
        """Returns the oldest piece, which the caller must end."""
        piece = self._pieces.popleft()
        self.size -= len(piece.view)
        return piece

    def take_into(self, pins: Pinned, start: int) -> int:
        """Copies as much as there is and fits behind byte ``start`` of the buffers; returns the bytes."""
        position = start
        while self._pieces and position < pins.size:
            piece = self._pieces[0]
            count = min(len(piece.view), pins.size - position)
            pins.fill(piece.view[:count], position)
            position += count
            self.size -= count
            if count == len(piece.view):
                self._pieces.popleft()
                piece.end()
            else:
                piece.skip(count)
        return position - start

    def put_back(self, data: bytes) -> None:
        if data:
            self._pieces.appendleft(StreamChunk(data))
            self.size += len(data)
            self.wake()

    def discard(self) -> None:
        """Drops what has arrived, because nobody will read it."""
        self._engine.teardown.children.pop(self._id, None)
        while self._pieces:
            self.take().end()
        self.wake()
