"""The byte stream over a tag queue: how writes are cut into messages, and what a cancelled write withdraws. Pure.

A write of less than ``LARGE_WRITE`` bytes goes in small pieces, which the receiver's library holds until they are read:
it waits only while the receiver's window is full. A larger write goes in large pieces, if the rendezvous threshold
allows that: they stay in the sender's buffer until they are read. An empty message ends the stream.

What arrives is a prefix of what was written, whatever is cancelled. Pieces are sent in order. When a write is
cancelled, the pieces that were not sent are withdrawn, the last first; those that were sent stay. A graceful close
gives up pieces that the receiver has yet to ask for only if nothing follows them (:class:`Tail`). The receiver, in
turn, delivers nothing behind a piece that was lost (``_rules.tag_queue``).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

#: Bytes. Small enough to be sent without waiting for the receiver; 64 KiB, because programs often write that much.
SMALL_PIECE = 64 * 1024
#: Bytes. From this size on, waiting for the receiver costs less than copying.
LARGE_WRITE = 256 * 1024
#: Bytes, at most. Small enough that a receiver can hold one in memory, large enough that their number does not matter.
LARGE_PIECE = 2**20
#: The most pieces of one write that are in flight at once.
AHEAD = 3
#: Bytes. A read joins small pieces until it has so many.
READ_SIZE = 64 * 1024


def small_piece(window: int) -> int:
    """Returns the most bytes of a small piece: no piece takes more than a quarter of the receiver's window."""
    return min(SMALL_PIECE, max(1, window // 4))


def pieces(total: int, window: int, threshold: int, start: int = 0) -> Iterator[slice]:
    """Returns how to cut a write of ``total`` bytes, from ``start`` on.

    Args:
        window: the receiver's.
        threshold: from how many bytes on a message stays with its sender; 0: it never does.
    """
    small = small_piece(window)
    if 0 < threshold <= LARGE_PIECE and total >= LARGE_WRITE:
        count = -(-total // LARGE_PIECE)
        size = -(-total // (64 * count)) * 64  # alike: a small rest would be no piece that stays here
    else:
        size = small if not threshold else min(small, max(1, threshold - 1))
    for place in range(start, total, size):
        yield slice(place, min(place + size, total))


class SentPiece(Protocol):
    """A piece whose send goes on."""

    @property
    def outcome(self) -> object | None:
        """None as long as it goes on."""

    def result(self) -> Any:
        """Raises what it failed with."""

    def cancel(self) -> bool:
        """Its write was cancelled: withdraws it if it was not sent."""


_Piece = TypeVar("_Piece", bound=SentPiece)


class Write(Generic[_Piece]):
    """A write that goes on: its pieces are submitted in order, a few ahead of what the receiver has taken."""

    def __init__(self, submit: Callable[[slice], _Piece | None], cut: Iterator[slice]) -> None:
        self._submit = submit
        self._cut = cut
        self._in_flight: collections.deque[_Piece] = collections.deque()

    def advance(self) -> _Piece | None:
        """Submits pieces, ``AHEAD`` at most. Returns the one to wait for before the next; None when all are done.

        Raises:
            Exception: what a piece failed with; then :meth:`cancel` the rest.
        """
        while True:
            for sent in self._in_flight:
                if sent.outcome is not None:
                    sent.result()  # nothing may follow a piece that was not sent
            while self._in_flight and self._in_flight[0].outcome is not None:
                self._in_flight.popleft()
            piece = next(self._cut, None) if len(self._in_flight) < AHEAD else None
            if piece is None:
                return self._in_flight[0] if self._in_flight else None
            pending = self._submit(piece)
            if pending is not None:
                self._in_flight.append(pending)

    def cancel(self) -> None:
        """The write is given up: withdraws what was not sent."""
        while self._in_flight:
            self._in_flight.pop().cancel()  # the last first: what was sent is a prefix


class Sent(Protocol):
    """A piece that was sent, and stays here until the receiver asks for it."""

    #: Whether its task was cancelled.
    cancelled: bool

    @property
    def outcome(self) -> object | None:
        """None as long as it stays."""


_Sent = TypeVar("_Sent", bound=Sent)


class Tail(Generic[_Sent]):
    """The last pieces of the stream, as far as they stay here until the receiver asks for them."""

    __slots__ = ("pieces",)

    def __init__(self) -> None:
        self.pieces: list[_Sent] = []

    def clear(self) -> None:
        """A piece was sent that cannot be taken back: everything before it must arrive."""
        if self.pieces:
            self.pieces = []

    def add(self, piece: _Sent) -> None:
        """A piece was sent that stays here."""
        self.pieces = [earlier for earlier in self.pieces if earlier.outcome is None]
        self.pieces.append(piece)

    def spare(self) -> list[_Sent]:
        """Returns the cancelled pieces at the end: no other piece follows them."""
        start = len(self.pieces)
        while start and self.pieces[start - 1].cancelled and self.pieces[start - 1].outcome is None:
            start -= 1
        return self.pieces[start:]
