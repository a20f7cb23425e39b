"""Figures that users get about Connections."""

from __future__ import annotations

import attrs


@attrs.frozen
class ConnectionStatistics:
    """Figures about a :class:`Connection`.

    Attributes:
        messages_sent, bytes_sent: messages that left, chunks of the byte stream included, and their payload.
        messages_received, bytes_received: messages that arrived, read or not, and their payload; of a message that
            its sender keeps until it is received, the announcement counts.
        held: what the messages cost that have arrived and were not read, in bytes of our window.
        credit: what the peer lets us send, in bytes of its window; less than 0 after it let a message in beyond it.
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
