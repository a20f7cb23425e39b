"""The rules of one connection, put together: credits, lanes, the byte stream, the end. Without I/O.

A :class:`Session` decides what is to be done; :class:`_link.Link`, its subclass, does it over UCX, and the tests over a
simulated wire. The rules themselves are in ``_lanes`` (who gets which message), ``_flow`` (who may send), ``_stream``
(bytes as messages) and ``_farewell`` (how it ends).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import attrs
import trio
from outcome import Error, Outcome, Value

from . import _stream as stream
from . import _wire as wire
from ._farewell import Farewell, Peer
from ._flow import Inbound, Outbound, Ticket
from ._lanes import Lane, Message, Receive, Run, Want
from .ucp._buffers import Buffer, Pinned
from .ucp._contained import contained
from .ucp._pending import Pending
from .ucp._tag import SHORT

if TYPE_CHECKING:
    from ._wire import Frame


#: Lanes in which nothing is, and which are kept all the same: one is used again and again, most often.
IDLE_LANES = 64


@attrs.frozen
class Options:
    """What a user can choose about a Connection."""

    close_timeout: float = 10
    window: int = 2**20
    max_message_size: int = 2**30


class Sending(Protocol):
    """A message on its way."""

    #: What becomes of it, once that is known.
    outcome: Outcome[None] | None
    #: Whether nobody waits for it any more.
    left_over: bool
    #: Whether its task was cancelled, so that it is not missed if it does not arrive.
    cancelled: bool
    lane: int

    def finish(self, result: Outcome[None]) -> None:
        """Tells who waits."""

    def leave_over(self) -> None:
        """Its task was cancelled, or told."""


class Session:
    """One connection."""

    def __init__(self, options: Options, peer_window: int, peer_threshold: int, threshold: int) -> None:
        self.options = options
        self.outbound = Outbound(peer_window, threshold)
        self.inbound = Inbound(options.window, peer_threshold)
        self.lanes: dict[int, Lane] = {}
        self.incoming = stream.Incoming()
        self.farewell = Farewell()
        self.closing = False
        self.closed = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.cancelled_sends = 0
        self.failed_sends = 0
        #: Whether an operation of the user's has failed because the connection broke: then the close need not say so.
        self.told = False
        self.orphans: set[Message] = set()
        #: Numbers of endpoints that the peer had made and could not keep; what it sent by them may still come.
        self.late_greetings: set[int] = set()
        #: The last pieces of the byte stream, as far as they stay here until the peer asks for them.
        self._stream_tail: list[Sending] = []
        self._sending_ready = False

    # ---- what the subclass does ----

    def problem(self) -> Exception | None:
        """Why the peer cannot be reached, if so."""
        raise NotImplementedError

    def broken(self, reason: str) -> Exception:
        """The exception for a connection that is no use any more."""
        raise NotImplementedError

    def post(self, lane: int, pins: Pinned) -> Sending | None:
        """Sends a message; None when that is done already.

        Raises:
            Exception: it cannot be sent; ``pins`` are released.
        """
        raise NotImplementedError

    def post_bytes(self, lane: int, data: bytes) -> Pending | None:
        """The same for bytes of at most SHORT."""
        raise NotImplementedError

    def check_memory(self, pins: Pinned) -> None:
        """Refuses memory that cannot be sent from.

        Raises:
            ValueError: ``pins`` are such, and released.
        """

    def control(self, frame: Frame) -> None:
        """Sends a control frame, which is never charged. Never raises."""
        raise NotImplementedError

    def move(self, message: Message, pins: Pinned | None) -> None:
        """See :class:`_lanes.Mover`; calls :meth:`moved`."""
        raise NotImplementedError

    def discard(self, message: Message) -> None:
        """See :class:`_lanes.Mover`."""
        raise NotImplementedError

    def unfinished(self) -> Iterable[Sending]:
        """The messages on their way."""
        raise NotImplementedError

    def changed(self) -> None:
        """Something changed that a task may wait for."""
        raise NotImplementedError

    def cut_off(self, reason: str) -> None:
        """The peer cannot be talked to any more."""
        raise NotImplementedError

    def internal_error(self, error: BaseException) -> None:
        """Ends the connection, and no other, after an exception in our own code. Never raises."""
        raise NotImplementedError

    def peer_left(self) -> None:
        """The peer has closed, and has our acknowledgement: lets go of what it did not take."""
        self.cut_off("has closed")

    # ---- sending ----

    def send_problem(self) -> Exception | None:
        if self.farewell.peer is Peer.SAID_GOODBYE:
            return self.broken("the peer closed the connection")
        return self.problem()

    def check_sendable(self) -> None:
        """Raises the reason why nothing can be sent, if there is one."""
        problem = self.send_problem()
        if problem is not None:
            self.told = True
            raise problem

    def submit(self, lane: int, data: Buffer) -> Pending | None:
        """Sends now or as soon as there is credit; None when UCX has taken it already."""
        self.check_sendable()
        pins = Pinned(data)
        self.check_memory(pins)
        if self.outbound.take(lane, pins.size):
            return self._posted(lane, pins)
        queued = QueuedSend(self, lane, pins)
        self.outbound.enqueue(queued)
        self.tell_stalled()
        return queued

    def _posted(self, lane: int, pins: Pinned) -> Pending | None:
        size = pins.size
        try:
            sending = self.post(lane, pins)
        except Exception:
            self.send_failed(told=True)
            raise
        self.bytes_sent += size
        if lane == wire.STREAM:
            if sending is None or not self.outbound.stays(size):
                self._stream_tail.clear()  # it cannot be taken back, so all before it must arrive
            else:
                self._stream_tail = [piece for piece in self._stream_tail if piece.outcome is None]
                self._stream_tail.append(sending)
        assert sending is None or isinstance(sending, Pending)
        return sending

    def take_short(self, lane: int, data: Buffer) -> bool:
        """Whether a message may go the short way now, as nothing is special; then :meth:`post_bytes` it."""
        if type(data) is not bytes or len(data) > SHORT or self.send_problem() is not None:
            return False
        if not self.outbound.take_small(lane, len(data)):
            return False
        self.bytes_sent += len(data)
        if lane == wire.STREAM:
            self._stream_tail.clear()  # as in _posted
        return True

    def submit_message(self, lane: int, data: Buffer) -> Pending | None:
        """The same as :meth:`submit` for a message of the user's, the short way if possible."""
        return self.post_bytes(lane, data) if self.take_short(lane, data) else self.submit(lane, data)

    def submit_nowait(self, lane: int, data: Buffer) -> None:
        """Sends now.

        Raises:
            trio.WouldBlock: there is no credit.
        """
        self.check_sendable()
        pins = Pinned(data)
        if not self.outbound.take(lane, pins.size):
            pins.release()
            self.tell_stalled()
            raise trio.WouldBlock
        self._posted(lane, pins)

    def send_cancelled(self, sending: Sending) -> None:
        """The task that waited for it was cancelled."""
        if sending.outcome is None:
            self.cancelled_sends += 1
            sending.cancelled = True
        sending.leave_over()

    def send_failed(self, told: bool) -> None:
        """A message that nobody had cancelled was not sent."""
        self.failed_sends += 1
        self.told = self.told or told

    def tell_stalled(self) -> None:
        if self.outbound.must_tell():
            self.control(wire.Stalled())

    def send_ready(self) -> None:
        """Sends what has waited for credit and may go now."""
        if self._sending_ready:
            return  # posting one can deliver credit for the next: the loop below sees it
        self._sending_ready = True
        try:
            while (ticket := self.outbound.next_ready()) is not None:
                assert isinstance(ticket, QueuedSend)
                ticket.post()
        finally:
            self._sending_ready = False
        self.changed()
        if self.outbound.queue:
            self.tell_stalled()

    def may_send(self, lane: int) -> bool:
        """Whether a small message could be sent, or would fail; if not, the peer is told."""
        if self.send_problem() is not None or self.closing or self.outbound.has_room(lane):
            return True
        self.tell_stalled()
        return False

    # ---- receiving ----

    def announced(self, number: int, length: int) -> None:
        """A message arrived: charges it. Then :meth:`arrived`.

        Raises:
            wire.ProtocolError: the peer must not send it.
        """
        wire.check_lane(number)
        if number == wire.STREAM and length > stream.MAX_PIECE:
            raise wire.ProtocolError(f"a piece of {length} bytes of the byte stream; {stream.MAX_PIECE} are allowed")
        self.inbound.arrived(number, length)

    def arrived(self, number: int, handle: int, length: int) -> None:
        self.bytes_received += length
        threshold = self.inbound.threshold
        self.lane(number).arrived(handle, length, whole=length < threshold if threshold else None)

    def run_arrived(self, number: int, count: int, length: int, data: bytes) -> None:
        """So many small messages of the same length arrived, one after the other in ``data``.

        Raises:
            wire.ProtocolError: the peer must not send them.
        """
        if number > wire.MAX_TAG:
            wire.check_lane(number)
        if not self.inbound.run_arrived(count, length):
            if count > 1:  # those that the peer had credit for count, whatever comes after them
                for index in range(count):
                    self.run_arrived(number, 1, length, data[index * length : (index + 1) * length])
                return
            self.inbound.arrived(number, length)
        self.bytes_received += len(data)
        lane = self.lanes.get(number) or self.lane(number)
        lane.run_arrived(Run(count, length, data))

    def lane(self, number: int) -> Lane:
        lane = self.lanes.get(number)
        if lane is None:
            lane = self.lanes[number] = Lane(number, self, sequential=number == wire.STREAM)
        return lane

    def receive(self, number: int, want: Want, pins: Pinned | None = None, size: int = 0) -> Receive:
        """Queues a receive; ``size`` is that of the buffer for ``Want.COPY``. (The caller has checked.)"""
        if want is Want.LENGTH:
            limit = 1 << 63
        elif number == wire.STREAM:
            limit = stream.MAX_PIECE
        elif want is Want.COPY:
            limit = size
        else:
            limit = pins.size if pins is not None else self.options.max_message_size
        lane = self.lane(number)
        receive = lane.wait(want, pins, limit)
        if receive.outcome is None:
            self._end_unserved(lane)
            if receive.outcome is None:
                self.looked(number)
        self._forget_idle(lane)
        return receive

    def looked(self, number: int) -> None:
        """Somebody found the lane empty: if that is for want of credit, let its next message in."""
        if not self.inbound.stalled:
            return
        amount, admit = self.inbound.looked(number)
        if amount:
            self._grant(amount)
        if admit:
            self.control(wire.Admit(number, self.inbound.received))

    def _forget_idle(self, lane: Lane) -> None:
        if len(self.lanes) > IDLE_LANES and lane.idle:
            self.lanes.pop(lane.number, None)

    def moved(self, message: Message, pins: Pinned, error: Exception | None) -> None:
        """A transfer ended."""
        lane = message.lane
        if pins is not message.pins:
            pins.release()
        lane.moved(message, error)
        if not self.closed:
            self._end_unserved(lane)
            self._forget_idle(lane)
            self._acknowledge()

    def take_small(self, lane: Lane, limit: int) -> bytes | None:
        """Takes the first message of a tag queue that has packed messages, if it is not longer than ``limit``."""
        data = lane.take_small(limit)
        if data is not None:
            self.run_consumed(len(data), 1)
        return data

    def take_run(self, lane: Lane) -> bytes:
        """Takes a whole run of packed messages, from a tag queue that has one."""
        run = lane.run
        assert run is not None
        lane.next_run()
        self.run_consumed(run.length, run.left)
        return run.rest()

    def run_consumed(self, length: int, count: int) -> None:
        amount = self.inbound.consumed(length, count)
        if amount:
            self._grant(amount)

    def consumed(self, message: Message) -> None:
        self.run_consumed(message.length, 1)

    def _grant(self, amount: int) -> None:
        self.control(wire.Grant(amount, self.inbound.received))

    def orphaned(self, message: Message, alone: bool) -> None:
        if alone:
            self.orphans.add(message)
        else:
            self.orphans.discard(message)
            self.changed()

    # ---- control frames ----

    def told_by_peer(self, frame: Frame) -> None:
        """A control frame came.

        Raises:
            wire.ProtocolError: the peer must not send it.
        """
        match frame:
            case wire.Grant(amount=amount, received=received):
                self.outbound.grant(amount, received)
                self.send_ready()
            case wire.Admit(lane=lane, received=received):
                self.outbound.admit(lane, received)
                self.send_ready()
            case wire.Stalled():
                granted = self.inbound.peer_stalled()
                if granted:
                    self._grant(granted)
                for waiting in [lane for lane in self.lanes.values() if lane.receives and not lane.messages]:
                    self.looked(waiting.number)
            case wire.Goodbye():
                self.farewell.peer_said()
                self._end()
                self._acknowledge()
            case wire.GoodbyeAck():
                self.farewell.acknowledged = True
                self.control(wire.Done())
                self.changed()
            case wire.Done():
                self.farewell.peer_done()
                self.changed()
                if self.farewell.peer is Peer.SAID_GOODBYE and not self.closing:
                    self.peer_left()
            case wire.Hello(number=number):
                if number not in self.late_greetings:
                    raise wire.ProtocolError("a second greeting")
                self.late_greetings.remove(number)

    # ---- the end ----

    def end_error(self) -> Exception | None:
        """What a receive gets for which no message is there: None while some may come."""
        if self.closed or self.closing:
            return trio.ClosedResourceError("this connection was closed")
        if self.farewell.peer is Peer.SAID_GOODBYE:
            return trio.EndOfChannel("the peer closed the connection")
        return self.problem()

    def _end_unserved(self, lane: Lane) -> None:
        error = lane.failure or self.end_error()
        if error is not None and lane.fail_unserved(error) and isinstance(error, trio.BrokenResourceError):
            self.told = True

    def _end(self) -> None:
        """The peer said goodbye or was lost."""
        problem = self.send_problem()
        assert problem is not None
        for lane in list(self.lanes.values()):
            lane.drop_held(None if self.farewell.peer is Peer.SAID_GOODBYE else problem)
            self._end_unserved(lane)
            self._forget_idle(lane)
        self.fail_sends(problem)

    def fail_sends(self, problem: Exception) -> None:
        for sending in list(self.unfinished()):
            if sending.outcome is None and not sending.left_over:
                sending.finish(Error(problem))  # it waits for the peer to ask for it
                sending.leave_over()
        for ticket in list(self.outbound.queue):
            self._withdraw(ticket, problem)
            self.told = True
        self.send_ready()

    def _acknowledge(self) -> None:
        transfers = any(lane.moving for lane in self.lanes.values())
        if self.farewell.may_acknowledge(transfers):
            self.control(wire.GoodbyeAck())
            self.changed()

    def lost(self) -> None:
        """The peer cannot be reached any more."""
        if self.closed:
            return
        problem = self.problem()
        assert problem is not None
        for lane in list(self.lanes.values()):
            lane.give_up_moving(problem)
        if self.farewell.lost():
            self._end()
        self.changed()

    def end_waits(self, error: Exception) -> None:
        """Ends all waits with this error, because the session cannot go on. Never raises."""
        for lane in list(self.lanes.values()):
            for receive in list(lane.receives):
                contained(lane.give_up, receive, error)
        for ticket in list(self.outbound.queue):
            contained(self._withdraw, ticket, error)
        contained(self.changed)

    def begin_close(self) -> None:
        """From here on the user can do nothing with it any more."""
        self.closing = True
        error = trio.ClosedResourceError("this connection was closed")
        for lane in self.lanes.values():
            for receive in list(lane.receives):
                lane.give_up(receive, error)
        # Messages that wait for credit are waited for; a write to the byte stream in another task ends, as in Trio.
        for ticket in [ticket for ticket in self.outbound.queue if ticket.lane == wire.STREAM]:
            self._withdraw(ticket, error)
        self.send_ready()

    def _withdraw(self, ticket: Ticket, error: Exception) -> None:
        assert isinstance(ticket, QueuedSend)
        try:
            self.outbound.withdraw(ticket)
            ticket.pins.release()
        finally:
            ticket.finish(Error(error))

    def sent_everything(self) -> bool:
        """Whether a goodbye may be said: what is still on its way was cancelled and is not missed, or is lost."""
        if self.send_problem() is not None:
            return True
        if self.outbound.queue:
            return False
        spare = self._spare_pieces()
        return all(
            sending.cancelled and (sending.lane != wire.STREAM or sending in spare) for sending in self.unfinished()
        )

    def _spare_pieces(self) -> list[Sending]:
        """The pieces of the byte stream that were cancelled and that nothing follows which was not."""
        start = len(self._stream_tail)
        while start and self._stream_tail[start - 1].cancelled and self._stream_tail[start - 1].outcome is None:
            start -= 1
        return self._stream_tail[start:]

    @property
    def undelivered(self) -> bool:
        """Whether something that was sent, and not cancelled, may not have reached the peer."""
        return bool(self.outbound.queue) or self.farewell.undelivered(
            self.outbound.sent, self.cancelled_sends, self.failed_sends
        )

    def let_go(self) -> None:
        """The connection is closed: everything that waits is told."""
        self.closing = self.closed = True
        error = trio.ClosedResourceError("this connection was closed")
        for lane in list(self.lanes.values()):
            lane.close(error)
        self.lanes.clear()
        self.fail_sends(error)
        self.changed()


class QueuedSend(Pending):
    """A send that waits for credit; then for UCX."""

    __slots__ = ("lane", "pins", "sending", "session", "size")

    def __init__(self, session: Session, lane: int, pins: Pinned) -> None:
        super().__init__()
        self.session = session
        self.lane = lane
        self.pins = pins
        self.size = pins.size
        #: Itself, once it is on its way.
        self.sending: Pending | None = None

    def post(self) -> None:
        try:
            self.sending = self.session._posted(self.lane, self.pins)
        except Exception as error:
            self.finish(Error(error))
            return
        if self.sending is None:
            self.finish(Value(None))
        elif self.sending.outcome is not None:  # it completed while it was posted
            self.finish(self.sending.outcome)
        else:
            self.sending.notify = self._completed

    def _completed(self, sending: Pending) -> None:
        assert sending.outcome is not None
        self.finish(sending.outcome)

    def internal_error(self, error: BaseException) -> None:
        self.session.internal_error(error)

    def abandon(self) -> bool:
        if self.outcome is not None:
            return True
        if self.sending is None:
            self.session.outbound.withdraw(self)
            self.pins.release()
            self.session.send_ready()  # it may have been in others' way
        else:
            self.sending.notify = None
            self.sending.abandon()
        return True
