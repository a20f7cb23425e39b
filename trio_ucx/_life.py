"""The life of a connection: how it ends, and what its calls do then. Pure.

What this side has done is :attr:`Ending.state`, what it failed with is :attr:`Ending.error`, and what the peer has done
is :class:`Peer`. :attr:`Life.sends` and :attr:`Life.receives` follow from that:

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

When this side has closed the connection, both get ``ClosedResourceError``. When our server drains, receives get the end
of the channel, and sends go on.

These events change what the peer has done:

============  ====================================================  ======================
event         what has happened                                     what the peer is then
============  ====================================================  ======================
STOP          its STOP has arrived                                  OPEN -> STOPPED
GOODBYE       its GOODBYE has arrived                               OPEN, STOPPED -> CLOSING
ACK_SENT      we have acknowledged that                             CLOSING -> ACKNOWLEDGED
DONE          it has our ACK                                        ACKNOWLEDGED -> CLOSED
GONE          it cannot be reached any more                         OPEN, STOPPED -> LOST; else CLOSED
============  ====================================================  ======================

The peer is STOPPED when it closes, and its last messages are still on their way. (Without STOP, two sides that close at
once would wait for each other: each for the other to receive its last messages.)

We send ACK as soon as no transfer from the peer is in flight. A GOODBYE is acknowledged (ACK), and so is the
acknowledgement (DONE). UCX may notice that an endpoint has gone before it reads what had been sent there, so if a side
closed right after its ACK, its peer might never read the ACK. Therefore a side that closes, and has got GOODBYE, waits
until the peer is CLOSED: until DONE arrives, or until the peer has gone, which says the same; for a second at most. The
two sides cannot wait for each other: DONE is sent as soon as ACK arrives, whatever else is missing.
"""

from __future__ import annotations

import enum

import attrs

from ._peer_info import PeerState
from .ucp._engine.ending import CloseState, Ending


class Peer(enum.Enum):
    """What the peer has done about the end: see the tables above."""

    OPEN = enum.auto()
    STOPPED = enum.auto()
    CLOSING = enum.auto()
    ACKNOWLEDGED = enum.auto()
    CLOSED = enum.auto()
    LOST = enum.auto()


class PeerEvent(enum.Enum):
    """What changes that: see the second table."""

    STOP = enum.auto()
    GOODBYE = enum.auto()
    ACK_SENT = enum.auto()
    DONE = enum.auto()
    GONE = enum.auto()


#: The second table. Where an event is missing, it has no effect.
NEXT = {
    (PeerEvent.STOP, Peer.OPEN): Peer.STOPPED,
    (PeerEvent.GOODBYE, Peer.OPEN): Peer.CLOSING,
    (PeerEvent.GOODBYE, Peer.STOPPED): Peer.CLOSING,
    (PeerEvent.ACK_SENT, Peer.CLOSING): Peer.ACKNOWLEDGED,
    (PeerEvent.DONE, Peer.ACKNOWLEDGED): Peer.CLOSED,
    (PeerEvent.GONE, Peer.OPEN): Peer.LOST,
    (PeerEvent.GONE, Peer.STOPPED): Peer.LOST,
    (PeerEvent.GONE, Peer.CLOSING): Peer.CLOSED,
    (PeerEvent.GONE, Peer.ACKNOWLEDGED): Peer.CLOSED,
}


class Answer(enum.Enum):
    """What the peer's end means for a call.

    Attributes:
        GOES_ON: a send is sent, a receive waits.
        END: the channel has ended, in order.
        PEER_CLOSED: nobody would read what is sent.
        LOST: the peer is lost.
    """

    GOES_ON = enum.auto()
    END = enum.auto()
    PEER_CLOSED = enum.auto()
    LOST = enum.auto()


#: The first table: what receives get, and sends.
ANSWERS = {
    Peer.OPEN: (Answer.GOES_ON, Answer.GOES_ON),
    Peer.STOPPED: (Answer.GOES_ON, Answer.PEER_CLOSED),
    Peer.CLOSING: (Answer.END, Answer.PEER_CLOSED),
    Peer.ACKNOWLEDGED: (Answer.END, Answer.PEER_CLOSED),
    Peer.CLOSED: (Answer.END, Answer.PEER_CLOSED),
    Peer.LOST: (Answer.LOST, Answer.LOST),
}


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


class Life:
    """How far one connection is on the way to its end.

    Args:
        ending: of its share in the endpoint.

    Attributes:
        peer: what the peer has done.
        receives, sends: what calls get because of that.
        acknowledged: whether our GOODBYE was acknowledged.
        draining: whether our server shuts down: receives end where nothing has arrived.
        stream_ended: whether the end of the peer's byte stream has arrived.
        receive_reported: whether a receive has raised that the connection broke: messages that arrive later are
            dropped.
        reason: how the peer was lost, for ``PeerLost.reason``; empty if only UCX, or the peer's process, says it.
        broken_off: whether the peer has broken off a message. Then it closes by force, and its control socket will say
            so in a moment.
    """

    __slots__ = (
        "acknowledged",
        "broken_off",
        "draining",
        "ending",
        "peer",
        "reason",
        "receive_reported",
        "receives",
        "sends",
        "stream_ended",
    )

    def __init__(self, ending: Ending) -> None:
        self.ending = ending
        self.peer = Peer.OPEN
        self.receives, self.sends = ANSWERS[Peer.OPEN]
        self.acknowledged = False
        self.draining = False
        self.stream_ended = False
        self.receive_reported = False
        self.reason = ""
        self.broken_off = False

    def happened(self, event: PeerEvent) -> None:
        """The peer has done something about the end."""
        self.peer = NEXT.get((event, self.peer), self.peer)
        self.receives, self.sends = ANSWERS[self.peer]

    # ---- this side ----

    @property
    def open(self) -> bool:
        """True if the user has not begun to close it."""
        return self.ending.state is CloseState.OPEN

    @property
    def closing(self) -> bool:
        """True if the user has begun to close it, and that is not over."""
        return self.ending.state is CloseState.CLOSING

    @property
    def closed(self) -> bool:
        """True if it is closed."""
        return self.ending.state is CloseState.CLOSED

    # ---- the peer ----

    @property
    def peer_closes(self) -> bool:
        """True if the peer has said GOODBYE."""
        return self.receives is Answer.END

    @property
    def peer_stopped(self) -> bool:
        """True if the peer has closed, or is about to, and receives nothing any more."""
        return self.sends is Answer.PEER_CLOSED

    @property
    def peer_waits(self) -> bool:
        """True if the peer may still lack our ACK."""
        return self.peer in (Peer.CLOSING, Peer.ACKNOWLEDGED)

    @property
    def graceful(self) -> bool:
        """True if a GOODBYE has arrived, at either side. If an end disappears after that, it is no loss."""
        return self.acknowledged or self.peer_closes

    @property
    def broke(self) -> bool:
        """True if the peer is lost, or the connection has failed."""
        return not self.graceful and (self.ending.error is not None or self.peer is Peer.LOST)

    @property
    def peer_state(self) -> PeerState:
        """What the user is told about the peer."""
        if self.broke:
            return PeerState.LOST
        return PeerState.FINISHED if self.graceful or self.stream_ended else PeerState.OPEN

    @property
    def over(self) -> bool:
        """True if no end is to be waited for any more."""
        return self.closed or self.broke or self.peer is Peer.CLOSED

    def undelivered(self, sent: int, cancelled: int, failed: int) -> bool:
        """True if messages that were sent, and not cancelled, may not have reached the peer.

        A peer that said GOODBYE leaves only after our ACK has arrived. What we had sent before it has then arrived,
        too, except messages that it had yet to ask for (those sends failed).
        """
        if self.graceful:
            return failed > 0
        return sent > cancelled
