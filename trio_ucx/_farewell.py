"""How a connection ends: who has said goodbye to whom, and what each may still do. A pure state machine.

=============  ==============================================  =================================================
the peer       our receives, once what had arrived is read     our sends
=============  ==============================================  =================================================
TALKS          wait                                            go out
SAID_GOODBYE   the end of the channel                          broken: nobody would read them
LOST           broken                                          broken
=============  ==============================================  =================================================

What the peer is after its goodbye does not matter: that its end of the connection then disappears is no loss.
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
        #: How many of our messages had reached the peer when it said goodbye.
        self.peer_received = 0
        self.acknowledged = False
        self._owes_ack = False

    def peer_said(self, received: int) -> None:
        if self.peer is Peer.TALKS:
            self.peer = Peer.SAID_GOODBYE
            self.peer_received = received
            self._owes_ack = True

    def lost(self) -> bool:
        """The peer cannot be reached any more. Returns whether that is a surprise."""
        surprise = self.peer is Peer.TALKS
        if surprise:
            self.peer = Peer.LOST
        self._owes_ack = False
        return surprise

    def may_acknowledge(self, transfers: bool) -> bool:
        """Whether the peer's goodbye is to be acknowledged now; asked once nothing hinders, it is done.

        A peer disappears when its goodbye is acknowledged, so not while transfers from it go on.
        """
        due = self._owes_ack and not transfers
        if due:
            self._owes_ack = False
        return due

    def undelivered(self, sent: int, cancelled: int) -> bool:
        """Whether messages that were sent, and not cancelled, may not have reached the peer."""
        if self.acknowledged:
            return False
        if self.peer is Peer.SAID_GOODBYE:
            return self.peer_received < sent - cancelled
        return sent > cancelled
