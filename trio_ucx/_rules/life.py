"""The life of a connection: how far each side is in closing it, and what sends and receives do then. No I/O.

``Ending.state`` says what this side has done, ``Ending.error`` what the connection has failed with, and ``Life.peer``
what the peer has done. ``Life.receives`` and ``Life.sends`` depend on ``Life.peer`` alone:

============  ==========================================  =============================================
the peer      receives, once what arrived was read        sends
============  ==========================================  =============================================
OPEN          wait                                        are sent
STOPPED       wait                                        PeerClosed: the peer reads no more
CLOSING       EndOfChannel                                PeerClosed
ACKNOWLEDGED  EndOfChannel                                PeerClosed
CLOSED        EndOfChannel                                PeerClosed
LOST          PeerLost                                    PeerLost
============  ==========================================  =============================================

The callers check two things besides. Once this side begins to close, every call raises ``ClosedResourceError``. While
our server drains, a receive outside conversations gets ``EndOfChannel`` if no message is there for it.

These events change ``Life.peer``:

============  ====================================================  ======================
event         what has happened                                     what the peer is then
============  ====================================================  ======================
STOP          the peer's STOP has arrived                           OPEN -> STOPPED
GOODBYE       the peer's GOODBYE has arrived                        OPEN, STOPPED -> CLOSING
ACK_SENT      we have sent ACK for it                               CLOSING -> ACKNOWLEDGED
DONE          DONE has arrived: the peer has our ACK                ACKNOWLEDGED -> CLOSED
GONE          the connection's share in the endpoint has failed     OPEN, STOPPED -> LOST; else CLOSED
============  ====================================================  ======================

A side that closes while its own sends are not over sends STOP first. STOP means that it receives nothing more; its last
messages may still arrive. Without STOP, two sides that close at once would wait for each other: each until the other
has received its last messages.

The peer answers GOODBYE with ACK, once no transfer from the closing side is in flight. The closing side answers ACK
with DONE. UCX may notice that an endpoint has gone before it reads what had been sent there: if a side closed right
after its ACK, its peer might never read the ACK. Therefore a side that has got GOODBYE waits, before it closes, until
the peer is CLOSED, for a second at most. The two sides cannot wait for each other: a side sends DONE as soon as ACK
arrives, whatever else is missing.
"""

from __future__ import annotations

import enum

import attrs

from .._peer_info import PeerState
from ..ucp._internal_api import CloseState, Ending


class Peer(enum.Enum):
    """What the peer has done about closing the connection: see the first table of the module."""

    OPEN = enum.auto()
    STOPPED = enum.auto()
    CLOSING = enum.auto()
    ACKNOWLEDGED = enum.auto()
    CLOSED = enum.auto()
    LOST = enum.auto()


class PeerEvent(enum.Enum):
    """What changes :class:`Peer`: see the second table of the module."""

    STOP = enum.auto()
    GOODBYE = enum.auto()
    ACK_SENT = enum.auto()
    DONE = enum.auto()
    GONE = enum.auto()


#: The second table. A pair that is missing has no effect.
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
    """What a send or a receive does, because of what the peer has done.

    Attributes:
        GOES_ON: a send is sent, a receive waits.
        END: a receive raises EndOfChannel: the peer has closed gracefully.
        PEER_CLOSED: a send raises PeerClosed: the peer reads no more.
        LOST: both raise PeerLost.
    """

    GOES_ON = enum.auto()
    END = enum.auto()
    PEER_CLOSED = enum.auto()
    LOST = enum.auto()


#: The first table: the answers for receives, and for sends.
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
    """The reason why a control socket no longer reports on the peer.

    Attributes:
        reason: text for error messages.
        vanished: whether the peer's host no longer answers.
        cause: the internal error that ended the control socket, if one did.
    """

    reason: str
    vanished: bool = False
    cause: BaseException | None = None


class Life:
    """How far the two sides of one connection are in closing it.

    Args:
        ending: that of the connection's share in the endpoint.

    Attributes:
        peer: what the peer has done.
        receives, sends: what receives and sends do because of that.
        acknowledged: whether the peer has acknowledged our GOODBYE.
        draining: whether our server shuts down. Receives then end where nothing has arrived.
        stream_ended: whether the end of the peer's byte stream has arrived.
        receive_reported: whether a receive has raised BrokenResourceError. Messages that arrive later are dropped.
        abort_arrived: whether the peer has said that it closes by force. The end of its control socket says no more.
        reason: the value of ``PeerLost.reason``; empty until it is known.
        broken_off: whether the peer has broken off a message: it closes by force, which it may not have said yet.
    """

    __slots__ = (
        "abort_arrived",
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
        self.abort_arrived = False
        self.reason = ""
        self.broken_off = False

    def happened(self, event: PeerEvent) -> None:
        """Changes ``peer``, ``receives`` and ``sends`` as the event does."""
        self.peer = NEXT.get((event, self.peer), self.peer)
        self.receives, self.sends = ANSWERS[self.peer]

    # ---- this side ----

    @property
    def open(self) -> bool:
        """True if the user has not begun to close the connection."""
        return self.ending.state is CloseState.OPEN

    @property
    def closing(self) -> bool:
        """True while the connection is being closed."""
        return self.ending.state is CloseState.CLOSING

    @property
    def closed(self) -> bool:
        """True if the connection is closed."""
        return self.ending.state is CloseState.CLOSED

    # ---- the peer ----

    @property
    def peer_closes(self) -> bool:
        """True if the peer has said GOODBYE."""
        return self.receives is Answer.END

    @property
    def peer_stopped(self) -> bool:
        """True if the peer has said STOP or GOODBYE: it receives nothing more."""
        return self.sends is Answer.PEER_CLOSED

    @property
    def peer_waits(self) -> bool:
        """True if the peer may still lack our ACK."""
        return self.peer in (Peer.CLOSING, Peer.ACKNOWLEDGED)

    @property
    def graceful(self) -> bool:
        """True if a GOODBYE has arrived, at either side. If a side disappears after that, it is no loss."""
        return self.acknowledged or self.peer_closes

    @property
    def broke(self) -> bool:
        """True if the peer was lost, or the connection has failed, before a GOODBYE arrived."""
        return not self.graceful and (self.ending.error is not None or self.peer is Peer.LOST)

    @property
    def peer_state(self) -> PeerState:
        """Returns what the user is to know about the peer."""
        if self.broke:
            return PeerState.LOST
        return PeerState.FINISHED if self.graceful or self.stream_ended else PeerState.OPEN

    @property
    def over(self) -> bool:
        """True if the connection is closed, was broken, or was closed by the peer."""
        return self.closed or self.broke or self.peer is Peer.CLOSED

    def undelivered(self, sent: int, cancelled: int, failed: int) -> bool:
        """True if the peer may lack a message that was sent and not cancelled.

        After a GOODBYE of either side everything that was sent has arrived, except messages that the peer had not asked
        for: those sends have failed.

        Args:
            sent, cancelled, failed: numbers of messages.
        """
        if self.graceful:
            return failed > 0
        return sent > cancelled
