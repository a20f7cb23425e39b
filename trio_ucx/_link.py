"""What is behind a Connection: messages in and out, credits, and the close. It outlives the Connection object.

Everything here runs in plain functions, called by the engine while it delivers or by the user's task; only the
graceful close waits. The rules are elsewhere: ``_lanes`` (who gets which message), ``_flow`` (who may send),
``_farewell`` (how it ends), ``_wire`` (the format).

The graceful close
==================

1. Wait for our own sends; UCX's flush does not count rendezvous messages that the peer has not asked for.
2. Flush, say goodbye, wait until the peer's library acknowledges. Flushed means, over tcp, handed to the kernel, which
   drops it when we close with unread input; acknowledged means that it has arrived.
3. If the peer said goodbye, too, stay until it has our acknowledgement (``_farewell`` says why).
4. Close the endpoint by force. (UCX's own graceful close cannot be given up, and would hang on a stopped peer.)

All within ``close_timeout``. When the closing task is cancelled, a system task goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import trio
from outcome import Error

from . import _wire as wire
from ._farewell import Farewell, Peer
from ._flow import Inbound, Outbound
from ._lanes import Lane, Message, Receive, State, Want
from ._native import ffi, lib
from ._peers import Watch
from ._transfers import MoveOperation, QueuedSend, SendOperation
from .ucp import Status, UCXError, Worker
from .ucp._buffers import Buffer, Pinned, new_bytes
from .ucp._operations import EndpointCore, Operation, live_handles
from .ucp._pending import Pending
from .ucp._status import broken, error_from_status
from .ucp._tag import post_pinned_send

if TYPE_CHECKING:
    from ._wire import Frame


@attrs.frozen
class Options:
    """What a user can choose about a Connection."""

    close_timeout: float = 10
    window: int = 2**20
    max_message_size: int = 2**30


#: Seconds to wait for the peer to say that it has our acknowledgement; that is all that is missing then.
LINGER = 1.0


class Link:
    """One connection."""

    def __init__(self, worker: Worker, core: EndpointCore, my_id: int, hello: wire.Hello, options: Options) -> None:
        self.worker = worker
        self.engine = worker._engine
        self.core = core
        self.my_id = my_id
        self.peer_id = hello.client_id if hello.kind == wire.OPEN else hello.server_id
        self.options = options
        self.outbound = Outbound(hello.window, worker.context.rendezvous_threshold or 0)
        self.inbound = Inbound(options.window, hello.threshold)
        self.lanes: dict[int, Lane] = {}
        self.farewell = Farewell()
        self.closing = False
        self.closed = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.cancelled_sends = 0
        self.failed_sends = 0
        #: Whether an operation of the user's has failed because the connection broke: then the close need not say so.
        self.told = False
        self._orphans: set[Message] = set()
        self._sending_ready = False
        self._deadline = math.inf
        self._watch: Watch | None = None
        self.engine.mailboxes[my_id] = self.arrived
        self.engine.children[my_id] = self.unclosed
        core.owner = self
        core.on_failure = self.lost
        core.on_close = self.close_now
        live_handles["connection"] += 1

    def watch_process(self, process: wire.Process) -> None:
        """Has the peer's death noticed where UCX would not, or late."""
        self._watch = Watch.open(self.engine, process, self._died)

    def _died(self) -> None:
        # What it had sent before is in shared memory or in a socket: take it before UCX closes them.
        self.engine.settle()
        self.core.fail(UCXError(Status.CONNECTION_RESET, f"the process at {self.core.label} died"))

    # ---- sending ----

    def check(self) -> None:
        """Refuses use after the close."""
        self.engine.check()
        if self.closing or self.closed:
            raise trio.ClosedResourceError("this connection was closed")

    def send_problem(self) -> Exception | None:
        if self.farewell.peer is Peer.SAID_GOODBYE:
            return broken("the peer closed the connection", self.core.error)
        return self.core.problem()

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
        if self.outbound.take(lane, pins.size):
            return self.post(lane, pins)
        queued = QueuedSend(self, lane, pins)
        self.outbound.enqueue(queued)
        self._tell_stalled()
        return queued

    def submit_nowait(self, lane: int, data: Buffer) -> None:
        """Sends now.

        Raises:
            trio.WouldBlock: there is no credit.
        """
        self.check_sendable()
        pins = Pinned(data)
        if not self.outbound.take(lane, pins.size):
            pins.release()
            if self.outbound.must_tell():
                self._control(wire.Stalled())
            raise trio.WouldBlock
        self.post(lane, pins)

    def post(self, lane: int, pins: Pinned) -> SendOperation | None:
        problem = self.core.problem()
        if problem is not None:
            pins.release()
            raise problem
        size = pins.size
        posted = post_pinned_send(self.core, pins, (self.peer_id << 32) | lane, kind=SendOperation)
        self.bytes_sent += size
        assert posted is None or isinstance(posted, SendOperation)
        return posted

    def abandon_send(self, operation: Operation) -> None:
        self.cancelled_sends += 1
        if isinstance(operation, SendOperation):
            operation.abandoned = True
        operation.leave_over()

    def _tell_stalled(self) -> None:
        if self.outbound.must_tell():
            self._control(wire.Stalled())

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
        self.core.changed()
        if self.outbound.queue:
            self._tell_stalled()

    async def wait_room(self, lane: int) -> None:
        """Waits until a small message could be sent, or would fail."""

        def settled() -> bool:
            if self.send_problem() is not None or self.closing or self.outbound.has_room(lane):
                return True
            self._tell_stalled()
            return False

        await self.core.wait_until(settled)

    def _control(self, frame: Frame) -> None:
        """Sends a control frame, which is never charged."""
        if self.core.handle is None:
            return
        pins = Pinned(wire.encode_frame(frame))
        try:
            post_pinned_send(self.core, pins, (self.peer_id << 32) | wire.CONTROL)
        except (trio.BrokenResourceError, trio.ClosedResourceError, UCXError):
            pass  # the connection's failure is told elsewhere

    # ---- receiving ----

    def arrived(self, number: int, handle: int, length: int) -> None:
        """A message arrived. The engine's delivery calls this."""
        try:
            if number == wire.CONTROL:
                self._control_arrived(handle, length)
                return
            if number > wire.MAX_TAG and number != wire.STREAM:
                raise wire.ProtocolError(f"the peer wrote to the reserved lane {number}")
            self.inbound.arrived(number, length)
        except wire.ProtocolError as error:
            if number != wire.CONTROL:
                self.engine.discard_message(handle)
            self.violated(error)
            return
        self.bytes_received += length
        threshold = self.inbound.threshold
        self.lane(number).arrived(handle, length, move=not threshold or length < threshold)

    def violated(self, error: wire.ProtocolError) -> None:
        """The peer broke the rules: it is cut off."""
        failure = UCXError(Status.INVALID_PARAM, f"the peer {self.core.label} was cut off: {error}")
        failure.__cause__ = error
        self.core.fail(failure)

    def lane(self, number: int) -> Lane:
        lane = self.lanes.get(number)
        if lane is None:
            lane = self.lanes[number] = Lane(number, self)
        return lane

    def receive(self, number: int, want: Want, pins: Pinned | None = None) -> Receive:
        """Queues a receive. (The caller has checked.)"""
        limit = pins.size if pins is not None else self.options.max_message_size
        if want is Want.LENGTH:
            limit = 1 << 63
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
            self._control(wire.Admit(number, self.inbound.received))

    def _forget_idle(self, lane: Lane) -> None:
        if lane.idle:
            self.lanes.pop(lane.number, None)

    def move(self, message: Message, pins: Pinned | None) -> None:
        if pins is None:
            message.data = new_bytes(message.length)
            pins = Pinned(message.data)
        engine = self.engine
        if pins.many is None:
            verdict = lib.tu_message_receive_one(
                engine.handle, message.handle, pins.address, pins.size, engine.received
            )
        else:
            verdict = lib.tu_message_receive(engine.handle, message.handle, pins.many, engine.received)
        message.handle = 0
        if verdict == 0:
            message.state = State.READY
            if pins is not message.pins:
                pins.release()
            return
        message.state = State.MOVING
        if verdict > 0:
            MoveOperation(self, verdict, message, pins)
            engine.settle()
        else:
            self.moved(message, pins, verdict)

    def moved(self, message: Message, pins: Pinned, status: int) -> None:
        """A transfer ended."""
        lane = message.lane
        if pins is not message.pins:
            pins.release()
        error: Exception | None = None
        if status != Status.OK:
            error = self.core.problem() or error_from_status(status, "receiving a message")
        lane.moved(message, error)
        if not self.closed:
            self._end_unserved(lane)
            self._forget_idle(lane)
            self._acknowledge()

    def consumed(self, message: Message) -> None:
        amount = self.inbound.consumed(message.length)
        if amount:
            self._grant(amount)

    def _grant(self, amount: int) -> None:
        self._control(wire.Grant(amount, self.inbound.received))

    def discard(self, message: Message) -> None:
        if self.engine.handle is not None:
            self.engine.discard_message(message.handle)

    def orphaned(self, message: Message, alone: bool) -> None:
        if alone:
            self._orphans.add(message)
        else:
            self._orphans.discard(message)
            self.core.changed()

    def buffers_released(self) -> bool:
        return not self._orphans and self.core.buffers_released()

    # ---- control frames ----

    def _control_arrived(self, handle: int, length: int) -> None:
        if length > wire.MAX_FRAME:
            self.engine.discard_message(handle)
            raise wire.ProtocolError(f"a control frame of {length} bytes")
        data = ffi.new("char[]", wire.MAX_FRAME)
        verdict = lib.tu_message_receive_one(self.engine.handle, handle, data, wire.MAX_FRAME, self.engine.received)
        if verdict != 0:
            if verdict > 0:
                Operation(self.engine, verdict, None, "receiving a control frame").leave_over()
            raise wire.ProtocolError("a control frame that did not arrive in one piece")
        frame = wire.decode_frame(bytes(ffi.buffer(data, length)))
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
                self._control(wire.Done())
                self.core.changed()
            case wire.Done():
                self.farewell.peer_done()
                self.core.changed()
                if self.farewell.peer is Peer.SAID_GOODBYE and not self.closing:
                    # It leaves. UCX would not say so where there is no socket; this lets go of what it did not take.
                    self.core.fail(UCXError(Status.CONNECTION_RESET, f"the peer {self.core.label} has closed"))
            case wire.Abort():
                self.core.fail(UCXError(Status.CONNECTION_RESET, f"the peer {self.core.label} aborted the connection"))

    # ---- the end ----

    def end_error(self) -> Exception | None:
        """What a receive gets for which no message is there: None while some may come."""
        if self.closed or self.closing:
            return trio.ClosedResourceError("this connection was closed")
        if self.farewell.peer is Peer.SAID_GOODBYE:
            return trio.EndOfChannel("the peer closed the connection")
        return self.core.problem()

    def _end_unserved(self, lane: Lane) -> None:
        error = self.end_error()
        if error is not None and lane.fail_unserved(error) and isinstance(error, trio.BrokenResourceError):
            self.told = True

    def _end(self) -> None:
        """The peer said goodbye or was lost."""
        for lane in list(self.lanes.values()):
            lane.drop_held()
            self._end_unserved(lane)
            self._forget_idle(lane)
        problem = self.send_problem()
        assert problem is not None
        self._fail_sends(problem)

    def _fail_sends(self, problem: Exception) -> None:
        for operation in [operation for operation in self.core.pending if isinstance(operation, SendOperation)]:
            if operation.outcome is None and not operation.left_over:
                operation.finish(Error(problem))  # it waits for the peer to ask for it
                operation.leave_over()
        for ticket in list(self.outbound.queue):
            self.outbound.withdraw(ticket)
            assert isinstance(ticket, QueuedSend)
            ticket.fail(problem)
        self.send_ready()

    def _acknowledge(self) -> None:
        transfers = any(lane.moving for lane in self.lanes.values())
        if self.farewell.may_acknowledge(transfers):
            self._control(wire.GoodbyeAck())
            self.core.changed()

    def lost(self) -> None:
        """The endpoint failed."""
        if self.closed:
            return
        problem = self.core.problem()
        assert problem is not None
        for lane in list(self.lanes.values()):
            lane.give_up_moving(problem)
        if self.farewell.lost():
            self._end()
        self.core.changed()

    def begin_close(self) -> None:
        """From here on the user can do nothing with it any more."""
        self.closing = True
        self._deadline = trio.current_time() + self.options.close_timeout
        error = trio.ClosedResourceError("this connection was closed")
        for lane in self.lanes.values():
            for receive in list(lane.receives):
                lane.give_up(receive, error)
        self.send_ready()

    async def close_gracefully(self) -> None:
        """Says goodbye, then closes; by force at the deadline. Can be cancelled, and begun again.

        Raises:
            trio.BrokenResourceError: what was sent may not have been delivered.
        """
        with trio.move_on_at(self._deadline):
            await self.core.wait_until(lambda: self.core.sends_done() and not self.outbound.queue)
            if self.send_problem() is None and not self.farewell.acknowledged:
                self._control(wire.Goodbye())
                self.engine.watch_events()
                await self.core.wait_until(lambda: self.core.handle is None or self.farewell.acknowledged)
            with trio.move_on_after(LINGER):
                self.engine.watch_events()
                await self.core.wait_until(lambda: self.core.handle is None or not self.farewell.peer_waits)
        undelivered = bool(self.outbound.queue) or self.farewell.undelivered(
            self.outbound.sent, self.cancelled_sends, self.failed_sends
        )
        error = self.core.error
        self.close_now()
        if undelivered and not self.told:
            reason = (
                str(error)
                if error is not None
                else (
                    "the peer closed the connection first"
                    if self.farewell.peer is Peer.SAID_GOODBYE
                    else f"the peer did not acknowledge within close_timeout, {self.options.close_timeout} seconds"
                )
            )
            raise broken(f"closing: what was sent may not have been delivered: {reason}", error)

    def abort(self) -> None:
        """Closes by force, at once; the peer is told if that needs no waiting."""
        if not self.closed:
            self._control(wire.Abort())
            self.close_now()

    def close_now(self) -> None:
        """Lets go of everything."""
        if self.closed:
            return
        self.closing = self.closed = True
        if self._watch is not None:
            self._watch.close()
        self.engine.children.pop(self.my_id, None)
        self.core.on_close = None
        self.core.close()
        self.engine.mailboxes.pop(self.my_id, None)
        error = trio.ClosedResourceError("this connection was closed")
        for lane in list(self.lanes.values()):
            lane.close(error)
        self.lanes.clear()
        self._fail_sends(error)
        self.core.changed()
        live_handles["connection"] -= 1

    #: What the worker's closing calls; replaced by the Connection, which warns.
    on_unclosed: Callable[[], None] | None = None

    def unclosed(self) -> None:
        if self.on_unclosed is not None:
            self.on_unclosed()
        self.abort()
