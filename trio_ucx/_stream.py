"""The byte stream over a lane of messages: how bytes are cut into messages, and put together again. Pure.

A small write is one message, which the receiver's library holds until it is read: no write waits for the other side
while the window has room. A write of ``LARGE_WRITE`` bytes or more goes in pieces that stay with the sender until they
are read, and then move without a copy on the way. An empty message ends the stream.

The stream is a prefix of what was written, whatever is cancelled: pieces are sent in order; when a write is cancelled,
those that were not sent are withdrawn, the last first, and those that were stay. A graceful close gives up those that
the receiver has yet to ask for only if nothing follows them (``Session.sent_everything``). The receiver, in turn, hands
nothing out behind a piece that was lost (``Lane.sequential``).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ucp._pending import Pending

#: Small enough to be sent without waiting for the receiver, large enough that their number does not matter.
SMALL_PIECE = 60 * 1024
#: From this size on, waiting for the receiver costs less than copying.
LARGE_WRITE = 256 * 1024
#: Small enough that a receiver can hold one in memory, large enough that their number does not matter.
LARGE_PIECE = 2**20
#: No piece may be longer.
MAX_PIECE = 2**22
#: How many pieces of one write are under way at once.
AHEAD = 3
#: How much a read joins from small pieces.
READ_SIZE = 64 * 1024


def pieces(total: int, window: int, threshold: int) -> Iterator[slice]:
    """How to cut a write of ``total`` bytes.

    Args:
        window: the receiver's; no piece takes more than a quarter of it.
        threshold: from how many bytes on a message stays with its sender; 0: it never does.
    """
    small = min(SMALL_PIECE, max(1, window // 4))
    if 0 < threshold <= LARGE_PIECE and total >= LARGE_WRITE:
        count = -(-total // LARGE_PIECE)
        size = -(-total // (64 * count)) * 64  # alike: a small rest would be no piece that stays here
    else:
        size = small if not threshold else min(small, max(1, threshold - 1))
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


class Write:
    """A write under way: its pieces are submitted in order, a few ahead of what the receiver has taken."""

    def __init__(self, submit: Callable[[memoryview], Pending | None], data: memoryview, cut: Iterator[slice]) -> None:
        self._submit = submit
        self._data = data
        self._cut = cut
        self._under_way: collections.deque[Pending] = collections.deque()

    def advance(self) -> Pending | None:
        """Submits what may be submitted. Returns what has to finish before there is more to do; None: all is done.

        Raises:
            Exception: what a piece failed with; then :meth:`cancel` the rest.
        """
        while True:
            while self._under_way and self._under_way[0].outcome is not None:
                self._under_way.popleft().result()
            piece = next(self._cut, None) if len(self._under_way) < AHEAD else None
            if piece is None:
                return self._under_way[0] if self._under_way else None
            pending = self._submit(self._data[piece])
            if pending is not None:
                self._under_way.append(pending)

    def cancel(self) -> None:
        """Nobody waits for it any more: withdraws what was not sent."""
        while self._under_way:
            self._under_way.pop().abandon()  # the last first: what has been sent is a prefix


class Incoming:
    """What has been received of the stream and not been read."""

    def __init__(self) -> None:
        self._rest: memoryview | None = None
        self.ended = False

    @property
    def readable(self) -> bool:
        """Whether a read need not wait."""
        return self._rest is not None or self.ended

    def feed(self, piece: bytes, more: Callable[[], bytes | None]) -> None:
        """A message of the lane came, and nothing was left.

        Args:
            piece: it.
            more: gives the next one if it is there; small ones are joined, which is cheaper than a read for each.
        """
        parts = [piece]
        size = len(piece)
        while parts[-1] and size < READ_SIZE and (following := more()) is not None:
            parts.append(following)
            size += len(following)
        self.ended = not parts[-1]
        if size:
            self._rest = memoryview(piece if size == len(piece) else b"".join(parts))

    def take(self, max_bytes: int | None) -> bytes:
        """What a read returns, b"" at the end."""
        rest = self._rest
        if rest is None:
            return b""
        if max_bytes is None or max_bytes >= len(rest):
            self._rest = None
            whole = rest.obj
            return whole if isinstance(whole, bytes) and len(whole) == len(rest) else bytes(rest)
        self._rest = rest[max_bytes:]
        return bytes(rest[:max_bytes])
