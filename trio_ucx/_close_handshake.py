"""The close handshake: how a connection ends, and what each side may still do. Pure.

==========  ==========================================  =============================================
the peer    our receives, once what arrived was read    our sends
==========  ==========================================  =============================================
OPEN        wait                                        are sent
CLOSING     end of the channel                          broken: nobody would read them
LOST        broken                                      broken
==========  ==========================================  =============================================

The peer is CLOSING when its GOODBYE has arrived. What becomes of it after that does not matter: that its end of the
connection disappears is then no loss.

A GOODBYE is acknowledged (ACK), and so is the acknowledgement (DONE). UCX may notice that an endpoint has gone before
it reads what had been sent there, so a side that closed right after its ACK would take the ACK away with it. Therefore
a side that has sent ACK waits until DONE arrives, or until the peer has gone, which says the same. The two sides cannot
wait for each other: DONE is sent as soon as ACK arrives, whatever else is missing.
"""

from __future__ import annotations

import enum


class Peer(enum.Enum):
    OPEN = enum.auto()
    CLOSING = enum.auto()
    LOST = enum.auto()


class CloseHandshake:
    """The end of one connection, seen from our side."""

    def __init__(self) -> None:
        #: Whether we close: the user can do nothing with the connection any more. And whether that is done.
        self.closing = False
        self.closed = False
        self.peer = Peer.OPEN
        #: Whether our GOODBYE was acknowledged.
        self.acknowledged = False
        #: Whether the peer waits for our ACK, or for the end of our side.
        self.peer_waits = False
        #: Whether ACK is to be sent as soon as no transfer from the peer is in flight: the peer disappears then.
        self.owes_acknowledgement = False
        #: Whether an operation of the user's has failed because the connection broke: then the close need not say so.
        self.error_reported = False

    @property
    def graceful(self) -> bool:
        """Whether one side has said GOODBYE, and the other has it: that an end disappears is no loss then."""
        return self.acknowledged or self.peer is Peer.CLOSING

    def goodbye_arrived(self) -> None:
        if self.peer is Peer.OPEN:
            self.peer = Peer.CLOSING
            self.owes_acknowledgement = self.peer_waits = True

    def done_arrived(self) -> None:
        self.peer_waits = False

    def lost(self) -> None:
        """The peer cannot be reached any more: it is lost, unless it has closed."""
        if self.peer is Peer.OPEN:
            self.peer = Peer.LOST
        self.owes_acknowledgement = self.peer_waits = False

    def undelivered(self, sent: int, cancelled: int, failed: int) -> bool:
        """Whether messages that were sent, and not cancelled, may not have reached the peer.

        A peer that said GOODBYE leaves when our ACK arrives, and with it everything that we had sent before, except
        messages that it had yet to ask for (those sends failed).
        """
        if self.graceful:
            return failed > 0
        return sent > cancelled
