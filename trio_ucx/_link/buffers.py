"""Messages in memory: packed messages, and what was read of the byte stream."""

from __future__ import annotations

from collections.abc import Callable

from .._rules.byte_stream import READ_SIZE

#: So many bytes that were taken already may be kept.
_KEPT = 4096


class PackedMessages:
    """Small messages of one length, one after the other in one bytes object: a ``_rules.tag_queue.Packed``."""

    __slots__ = ("_data", "_position", "length", "remaining")

    def __init__(self, count: int, length: int, data: bytes) -> None:
        self.remaining = count
        self.length = length
        self._data = data
        self._position = 0

    @property
    def first(self) -> bytes:
        """The first of them, which is not taken."""
        return self._data[self._position : self._position + self.length]

    def pop(self) -> bytes:
        """Takes the first of them."""
        start = self._position
        self._position = end = start + self.length
        self.remaining -= 1
        if start == 0 and self.remaining == 0:
            return self._data
        data = self._data[start:end]
        if end > _KEPT and self.remaining and end > len(self._data) - end:
            self._data = self._data[end:]  # what is unread must not keep much that is read
            self._position = 0
        return data

    def pop_all(self) -> bytes:
        """Takes all that are left, one after the other."""
        self.remaining = 0
        return self._data[self._position :] if self._position else self._data


class ReadBuffer:
    """What was received of the byte stream and not read."""

    def __init__(self) -> None:
        self._rest: bytes | memoryview | None = None
        self.ended = False

    @property
    def readable(self) -> bool:
        """True if a read need not wait."""
        return self._rest is not None or self.ended

    def feed(self, piece: bytes, more: Callable[[], bytes | None]) -> None:
        """Adds the next message of the stream; nothing may be left of earlier ones.

        Args:
            piece: the message.
            more: returns the one after it if it is there. Small ones are joined: that costs less than a read for each.
        """
        parts = [piece]
        size = len(piece)
        while parts[-1] and size < READ_SIZE and (following := more()) is not None:
            parts.append(following)
            size += len(following)
        self.ended = not parts[-1]
        if size:
            self._rest = piece if size == len(piece) else b"".join(parts)

    def take(self, max_bytes: int | None) -> bytes:
        """Takes at most ``max_bytes``: what a read returns, b"" at the end."""
        rest = self._rest
        if rest is None:
            return b""
        if max_bytes is None or max_bytes >= len(rest):
            data = bytes(rest)
            self._rest = None
        else:
            data = bytes(rest[:max_bytes])
            self._rest = memoryview(rest)[max_bytes:]
        return data
