"""What an endpoint has received of its UCP stream, in pieces that UCX lends, until somebody takes it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs

from .._native import lib
from ._loans import Loan
from ._pending import Signal

if TYPE_CHECKING:
    from ._buffers import Pinned
    from ._engine import Engine


@attrs.define(eq=False)
class Piece:
    """A part of the stream: memory of UCX's, or (no loan) bytes that were put back."""

    view: memoryview
    loan: Loan | None

    def end(self) -> None:
        if self.loan is not None:
            self.view = memoryview(b"")  # it may be a slice of the loan's
            self.loan.end()


class Inbox:
    """The unread part of a stream. Whatever is taken and not used can be put back."""

    __slots__ = ("_engine", "_pieces", "_waiter", "size")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pieces: deque[Piece] = deque()
        self._waiter: Signal | None = None
        #: Unread bytes.
        self.size = 0

    def arrived(self, address: int, length: int) -> None:
        engine = self._engine
        loan = Loan(engine, address, length, lambda: lib.tu_stream_release(engine.handle, address))
        self._pieces.append(Piece(loan.view, loan))
        self.size += length
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None:
            self._waiter.set()

    @property
    def awaited(self) -> bool:
        return self._waiter is not None

    async def wait(self) -> None:
        """Waits until something arrives or :meth:`wake` is called. Cancelling it loses nothing."""
        self._waiter = Signal()
        try:
            await self._waiter.wait()
        finally:
            self._waiter = None

    def take(self) -> Piece:
        """The oldest piece, to be ended by the caller."""
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
                piece.view = piece.view[count:]
        return position - start

    def put_back(self, data: bytes) -> None:
        if data:
            self._pieces.appendleft(Piece(memoryview(data), None))
            self.size += len(data)
            self.wake()

    def discard(self) -> None:
        """Nobody will read it."""
        while self._pieces:
            self.take().end()
        self.wake()
