"""The close handshake: how a connection ends, and what each side may still do. Pure.

============  ==========================================  =============================================
the peer      our receives, once what arrived was read    our sends
============  ==========================================  =============================================
OPEN          wait                                        are sent
STOPPED       wait                                        broken: nobody would read them
CLOSING       end of the channel                          broken
ACKNOWLEDGED  end of the channel                          broken
CLOSED        end of the channel                          broken
LOST          broken                                      broken
============  ==========================================  =============================================

The peer is STOPPED when its STOP has arrived: it closes, and its last messages are still on their way. (Without STOP,
two sides that close at once would wait for each other: each for the other to receive its last messages.)

The peer is CLOSING when its GOODBYE has arrived. We send ACK as soon as no transfer from the peer is in flight; then it
is ACKNOWLEDGED. If the peer disappears after its GOODBYE, it is CLOSED, not LOST.

A GOODBYE is acknowledged (ACK), and so is the acknowledgement (DONE). UCX may notice that an endpoint has gone before
it reads what had been sent there, so if a side closed right after its ACK, its peer might never read the ACK. Therefore
a side that closes, and has got GOODBYE, waits until the peer is CLOSED: until DONE arrives, or until the peer has gone,
which says the same; for a second at most. The two sides cannot wait for each other: DONE is sent as soon as ACK
arrives, whatever else is missing.

What this side has done about the end is in the share (``ucp/_engine/ending.py``).
"""

from __future__ import annotations

import enum

import attrs


class Peer(enum.Enum):
    """What the peer has done about the end: see the table above."""

    OPEN = enum.auto()
    STOPPED = enum.auto()
    CLOSING = enum.auto()
    ACKNOWLEDGED = enum.auto()
    CLOSED = enum.auto()
    LOST = enum.auto()


@attrs.frozen
class Loss:
    """Why the control socket tells nothing about the peer any more.

    Attributes:
        reason: in words.
        vanished: whether the peer's host does not answer any more. Else the peer's end was closed, or something failed.
        cause: the internal error that ended the control socket, if one did.
    """

    reason: str
    vanished: bool = False
    cause: BaseException | None = None


class CloseHandshake:
    """What the two sides of one connection have said about its end."""

    def __init__(self) -> None:
        self.peer = Peer.OPEN
        #: Whether our GOODBYE was acknowledged.
        self.acknowledged = False

    @property
    def peer_closes(self) -> bool:
        """Whether the peer has said GOODBYE."""
        return self.peer in (Peer.CLOSING, Peer.ACKNOWLEDGED, Peer.CLOSED)

    @property
    def peer_stopped(self) -> bool:
        """Whether the peer has closed, or is about to, and receives nothing any more."""
        return self.peer is Peer.STOPPED or self.peer_closes

    @property
    def peer_waits(self) -> bool:
        """Whether the peer may still lack our ACK."""
        return self.peer in (Peer.CLOSING, Peer.ACKNOWLEDGED)

    @property
    def graceful(self) -> bool:
        """Whether a GOODBYE has arrived, at either side. If an end disappears after that, it is no loss."""
        return self.acknowledged or self.peer_closes

    def stop_arrived(self) -> None:
        if self.peer is Peer.OPEN:
            self.peer = Peer.STOPPED

    def goodbye_arrived(self) -> None:
        if self.peer in (Peer.OPEN, Peer.STOPPED):
            self.peer = Peer.CLOSING

    def ack_arrived(self) -> None:
        self.acknowledged = True

    def ack_sent(self) -> None:
        self.peer = Peer.ACKNOWLEDGED

    def done_arrived(self) -> None:
        if self.peer is Peer.ACKNOWLEDGED:
            self.peer = Peer.CLOSED

    def lost(self) -> None:
        """The peer cannot be reached any more: it is lost, unless it has said GOODBYE."""
        self.peer = Peer.CLOSED if self.peer_closes else Peer.LOST

    def undelivered(self, sent: int, cancelled: int, failed: int) -> bool:
        """Whether messages that were sent, and not cancelled, may not have reached the peer.

        A peer that said GOODBYE leaves only after our ACK has arrived. What we had sent before it has then arrived,
        too, except messages that it had yet to ask for (those sends failed).
        """
        if self.graceful:
            return failed > 0
        return sent > cancelled
