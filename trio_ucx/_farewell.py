"""How a connection ends: who has said goodbye to whom, and what each may still do. A pure state machine.

=============  ==============================================  =================================================
the peer       our receives, once what had arrived is read     our sends
=============  ==============================================  =================================================
TALKS          wait                                            go out
SAID_GOODBYE   the end of the channel                          broken: nobody would read them
LOST           broken                                          broken
=============  ==============================================  =================================================

What the peer is after its goodbye does not matter: that its end of the connection then disappears is no loss.

A goodbye is acknowledged, and the acknowledgement, too (DONE). For UCX may notice that an endpoint has gone before it
reads what had been sent there: who closes right after acknowledging takes the acknowledgement away with it. So whoever
has acknowledged waits until the peer is DONE, or has gone, which says the same. Nobody waits in a circle: DONE is sent
as soon as the acknowledgement comes, whatever else is missing.
"""

from __future__ import annotations

import enum


class Peer(enum.Enum):
    TALKS = enum.auto()
    SAID_GOODBYE = enum.auto()
    LOST = enum.auto()


class Farewell:
    """The end of one connection."""

    def __init__(self) -> None:
        self.peer = Peer.TALKS
        #: Whether our goodbye was acknowledged.
        self.acknowledged = False
        #: Whether the peer waits for our acknowledgement of its goodbye.
        self.peer_waits = False
        self._owes_ack = False

    def peer_said(self) -> None:
        if self.peer is Peer.TALKS:
            self.peer = Peer.SAID_GOODBYE
            self._owes_ack = self.peer_waits = True

    def peer_done(self) -> None:
        self.peer_waits = False

    def lost(self) -> bool:
        """The peer cannot be reached any more. Returns whether that is a surprise."""
        surprise = self.peer is Peer.TALKS
        if surprise:
            self.peer = Peer.LOST
        self._owes_ack = self.peer_waits = False
        return surprise

    def may_acknowledge(self, transfers: bool) -> bool:
        """Whether the peer's goodbye is to be acknowledged now; asked once nothing hinders, it is done.

        A peer disappears when its goodbye is acknowledged, so not while transfers from it go on.
        """
        due = self._owes_ack and not transfers
        if due:
            self._owes_ack = False
        return due

    def undelivered(self, sent: int, cancelled: int, failed: int) -> bool:
        """Whether messages that were sent, and not cancelled, may not have reached the peer.

        A peer that said goodbye leaves when our acknowledgement comes, and so everything that we sent before; but not
        what it had to ask for (those sends failed).
        """
        if self.acknowledged or self.peer is Peer.SAID_GOODBYE:
            return failed > 0
        return sent > cancelled
