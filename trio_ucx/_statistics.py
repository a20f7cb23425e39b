"""Statistics of Connections and of Servers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import attrs

from .ucp import ConnectionTotals

#: How a connection can have ended: see ``ConnectionTotals.ended``.
END_REASONS = ("closed", "aborted_here", "aborted", "ended", "vanished", "unresponsive", "broken")
#: Why a client can have been refused: see ``ServerStatistics.refused``.
REFUSAL_REASONS = ("draining", "full", "not_admitted", "not_trio_ucx", "other")


@attrs.frozen
class ConnectionStatistics:
    """Statistics of a :class:`Connection`.

    Gauges: ``held``, ``credit``, ``queued_sends`` and ``left_over_operations``, which go up and down. The others are
    counters, which only grow.

    Attributes:
        messages_sent, bytes_sent: messages that were sent, pieces of the byte stream included, and their payload.
        messages_received, bytes_received: messages that have arrived, read or not, and their payload. A message that
            its sender keeps until it is received counts from its announcement on.
        held: what the unread messages cost, in bytes of our window.
        credit: what the peer lets us send, in bytes of its window; below 0 after the peer has admitted a message
            without credit.
        queued_sends: sends that wait for credit.
        left_over_operations: sends and transfers whose task was cancelled and whose buffers are not released yet.
    """

    messages_sent: int
    bytes_sent: int
    messages_received: int
    bytes_received: int
    held: int
    credit: int
    queued_sends: int
    left_over_operations: int


@attrs.frozen
class ServerStatistics:
    """Statistics of a :class:`Server`. Counters only grow; gauges go up and down.

    Attributes:
        connections: the connections for which it has started handlers.
        handlers: gauge: handlers that run. Connections that are open besides are being closed.
        handshaking: gauge: clients whose handshake is not finished.
        waiting: gauge: connections that wait to be accepted.
        refused: counters: clients that were turned away, or left before they were connected, by reason: ``"draining"``,
            which includes that the listener closed; ``"full"``; ``"not_admitted"``; ``"not_trio_ucx"``: they speak
            another protocol; ``"other"``: they left, were too slow, or cannot be reached over UCX.
        drains: counter: calls of :meth:`Server.drain`, those for signals included.
        handlers_cancelled: counter: handlers that drains have cancelled.
    """

    connections: ConnectionTotals
    handlers: int
    handshaking: int
    waiting: int
    refused: Mapping[str, int]
    drains: int
    handlers_cancelled: int


class Counted(Protocol):
    """What :class:`Totals` needs of a connection.

    Attributes:
        totals: where it counts.
    """

    totals: tuple[Totals, ...]

    def traffic(self) -> tuple[int, int, int, int]:
        """Returns the messages and bytes that it has sent, and those that it has received."""

    def end_reason(self) -> str | None:
        """Returns how it has ended: one of END_REASONS; None: it is open."""


class Totals:
    """Sums up connections: those that are open, and those that have ended. Any thread may read.

    A connection's own counters are read when somebody asks, and when the connection ends: a message costs nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may read while this thread has it
        self._open: set[Counted] = set()
        self._opened = 0
        self._ended = Counter(dict.fromkeys(END_REASONS, 0))
        self._traffic = (0, 0, 0, 0)

    def add(self, connection: Counted) -> None:
        """Counts a connection from now on, with what it has sent and received before."""
        connection.totals += (self,)
        with self._lock:
            self._opened += 1
            self._open.add(connection)
        if connection.end_reason() is not None:
            self.end(connection)

    def end(self, connection: Counted) -> None:
        """A connection has ended, and changes its counters no more."""
        with self._lock:
            self._open.discard(connection)
            self._ended[connection.end_reason() or "closed"] += 1
            self._traffic = _sum(self._traffic, connection.traffic())

    def read(self) -> ConnectionTotals:
        """Returns the sums. Each connection counts once: as open, or as ended."""
        with self._lock:
            connections, opened, ended, traffic = list(self._open), self._opened, dict(self._ended), self._traffic
        for connection in connections:
            traffic = _sum(traffic, connection.traffic())
        return ConnectionTotals(len(connections), opened, ended, *traffic)


def _sum(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    return (one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3])
