"""Statistics of Connections."""

from __future__ import annotations

import attrs


@attrs.frozen
class ConnectionStatistics:
    """Statistics of a :class:`Connection`.

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
