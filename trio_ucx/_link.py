"""What is behind a Connection: a session's rules, carried out over UCX. It outlives the Connection object.

Everything here runs in plain functions, called by the engine while it delivers or by the user's task; only the
graceful close waits.

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
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import trio

from . import _wire as wire
from ._farewell import Peer
from ._lanes import Message, State
from ._native import lib
from ._outbox import LONGEST_MESSAGE, Outbox
from ._session import Options, Session
from ._transfers import MoveOperation, SendOperation
from .ucp import Status, UCXError, Worker
from .ucp._arming import MOMENT
from .ucp._buffers import Pinned, new_bytes
from .ucp._contained import contained, report
from .ucp._operations import EndpointCore, live_handles, under_way
from .ucp._posting import check_reaches
from .ucp._status import broken, error_from_status
from .ucp._tag import post_bytes_send, post_pinned_send

if TYPE_CHECKING:
    from ._wire import Frame


#: Seconds to wait for the peer to say that it has our acknowledgement; that is all that is missing then.
DONE_TIMEOUT = 1.0
#: Seconds to wait for messages that a peer had sent before it aborted.
ABORT_GRACE = 0.5


class ControlSocket(Protocol):
    """Tells the peer, and us, that the other side has gone."""

    def abort(self, sent: int = 0) -> None:
        """Tells the peer that this side closes by force, after so many messages over UCX, and closes the socket."""

    def close(self) -> None:
        """Closes."""


class Link(Session):
    """One connection, over an endpoint."""

    def __init__(
        self,
        worker: Worker,
        core: EndpointCore,
        my_id: int,
        peer_id: int,
        peer_window: int,
        peer_threshold: int,
        options: Options,
    ) -> None:
        super().__init__(options, peer_window, peer_threshold, worker.context.rendezvous_threshold or 0)
        self.worker = worker
        self.engine = core.engine
        self.core = core
        self.my_id = my_id
        self.peer_id = peer_id
        #: Tells that the peer aborted, ended or vanished.
        self.control_socket: ControlSocket | None = None
        #: The addresses of the control socket.
        self.local_address: tuple[str, int] | None = None
        self.remote_address: tuple[str, int] | None = None
        #: Takes the endpoint of a connection that was closed gracefully.
        self.keep_endpoint: Callable[[EndpointCore], None] | None = None
        #: Called when the link has been closed.
        self.on_closed: Callable[[], None] | None = None
        #: Whether the endpoint is closed a moment later than the peer closed its own; not over shared memory.
        self.lingers = False
        self._aborted = False
        self._deadline = math.inf
        self._outbox = Outbox()
        #: Whether messages may be held back: not if UCX would keep a batch here until the peer receives it.
        self._holds = not self.outbound.stays(wire.MAX_BATCH)
        # When the last short message was sent, and how often the worker had been looked at.
        self._sent_at = 0.0
        self._sent_turn = 0
        self.engine.mail.boxes[my_id] = self
        self.engine.mail.expect_rendezvous(peer_threshold)
        self.engine.children[my_id] = self.unclosed
        core.owner = self
        core.on_failure = self.lost
        core.on_close = self.close_now
        live_handles.opened("connection")

    # ---- what the session asks ----

    def problem(self) -> Exception | None:
        return self.core.problem()

    def broken(self, reason: str) -> Exception:
        return broken(reason, self.core.error, self.core.origin)

    def changed(self) -> None:
        self.core.changed()

    def cut_off(self, reason: str) -> None:
        error = UCXError(Status.CONNECTION_RESET, f"the peer {self.core.label} {reason}")
        self.core.fail(error, linger=self.lingers)

    def check(self) -> None:
        """Refuses use after the close."""
        self.engine.check()
        if self.closing or self.closed:
            raise trio.ClosedResourceError("this connection was closed")

    # ---- sending ----

    def post(self, lane: int, pins: Pinned) -> SendOperation | None:
        problem = self.core.problem()
        if problem is not None:
            pins.release()
            raise problem
        self.send_held()
        sending = post_pinned_send(self.core, pins, (self.peer_id << 32) | lane, kind=SendOperation)
        if sending is not None:
            assert isinstance(sending, SendOperation)
            sending.lane = lane
        return sending

    def post_bytes(self, lane: int, data: bytes) -> SendOperation | None:
        if len(data) <= LONGEST_MESSAGE:
            outbox = self._outbox
            if not outbox.parts:
                # Does it closely follow another? Not where its sender waited for anything in between.
                now = perf_counter()
                turns = self.engine.turns
                follows = turns == self._sent_turn and now - self._sent_at < MOMENT and self._holds
                self._sent_at = now
                self._sent_turn = turns
                if not follows:
                    return self._post_bytes(lane, data)
                self.engine.batches.defer(self)
            if outbox.add(lane, data):
                self.send_held()
            return None
        self.send_held()
        return self._post_bytes(lane, data)

    def _post_bytes(self, lane: int, data: bytes) -> SendOperation | None:
        try:
            sending = post_bytes_send(self.core, data, (self.peer_id << 32) | lane, SendOperation)
        except Exception:
            self.send_failed(told=lane != wire.BATCH)  # whose messages' senders have gone on
            raise
        if sending is not None:
            assert isinstance(sending, SendOperation)
            sending.lane = lane
        return sending

    def send_held(self) -> None:
        """See :class:`ucp._loop_hooks.DeferredBatch`."""
        if not self._outbox.parts:
            return
        try:
            batch = self._outbox.take()
            if self.core.handle is None:
                return
            self.engine.counters["batches"] += 1
            self._post_bytes(wire.BATCH, batch)
        except (trio.BrokenResourceError, trio.ClosedResourceError, UCXError) as error:
            if self.core.error is None:
                self.core.fail(error if isinstance(error, UCXError) else UCXError(Status.IO_ERROR, str(error)))
            self.engine.settle()
        except Exception as error:  # the sends of these messages have returned already
            self.internal_error(error)

    def check_memory(self, pins: Pinned) -> None:
        check_reaches(self.engine, pins)

    def unfinished(self) -> Iterable[SendOperation]:
        return (operation for operation in self.core.pending if isinstance(operation, SendOperation))

    def control(self, frame: Frame) -> None:
        if self.core.handle is None:
            return
        self.send_held()
        try:
            post_bytes_send(self.core, wire.encode_frame(frame), (self.peer_id << 32) | wire.CONTROL)
        except (trio.BrokenResourceError, trio.ClosedResourceError, UCXError):
            pass  # the failure of the connection is reported elsewhere
        except Exception as error:  # else a peer that waits for this frame would wait for ever
            self.internal_error(error)

    async def wait_room(self, lane: int) -> None:
        """Waits until a small message could be sent, or would fail."""
        await self.core.wait_until(lambda: self.may_send(lane))

    # ---- receiving ----

    def message_came(self, lane: int, handle: int, length: int) -> None:
        """The engine's delivery calls this."""
        try:
            if lane == wire.CONTROL:  # control frames are so small that C code receives them
                raise wire.ProtocolError(f"a control frame of {length} bytes")
            self.announced(lane, length)
        except wire.ProtocolError as error:
            self.engine.mail.discard(handle)
            self._refuse(error)
            return
        self.arrived(lane, handle, length)

    def run_came(self, lane: int, count: int, length: int, data: bytes) -> None:
        """So does it this."""
        try:
            if count == 0:
                raise wire.ProtocolError(f"a message of {length} bytes that did not arrive in one piece")
            if lane == wire.CONTROL:
                for number in range(count):
                    self.told_by_peer(wire.decode_frame(data[number * length : (number + 1) * length]))
            else:
                self.run_arrived(lane, count, length, data)
        except wire.ProtocolError as error:
            self._refuse(error)

    def _refuse(self, error: wire.ProtocolError) -> None:
        failure = UCXError(Status.INVALID_PARAM, f"the peer {self.core.label} was cut off: {error}")
        failure.__cause__ = error
        self.core.fail(failure)

    def move(self, message: Message, pins: Pinned | None) -> None:
        if pins is None:
            message.data = new_bytes(message.length)
            pins = Pinned(message.data)
        engine = self.engine
        if pins.many is None:
            verdict = lib.tu_message_receive_one(
                engine.handle, message.handle, pins.address, pins.size, pins.memory, engine.received
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
            try:
                MoveOperation(self, verdict, message, pins)
            except BaseException as error:
                engine.keep(verdict, (pins, message))
                raise RuntimeError("an operation that UCX has begun could not be recorded") from error
            engine.settle()
        else:
            self.move_ended(message, pins, verdict)

    def move_ended(self, message: Message, pins: Pinned, status: int) -> None:
        """UCX has finished writing a message to memory, or will not."""
        error: Exception | None = None
        if status != Status.OK:
            error = self.core.problem() or error_from_status(status, "receiving a message", self.core.origin)
        self.moved(message, pins, error)

    def discard(self, message: Message) -> None:
        if self.engine.handle is not None:
            self.engine.mail.discard(message.handle)

    def buffers_released(self) -> bool:
        return not self.orphans and self.core.buffers_released()

    # ---- the end ----

    def begin_close(self) -> None:
        self._deadline = trio.current_time() + self.options.close_timeout
        super().begin_close()

    async def close_gracefully(self) -> None:
        """Says goodbye, then closes; by force at the deadline. Can be cancelled, and begun again.

        Raises:
            trio.BrokenResourceError: what was sent may not have been delivered.
        """
        with trio.move_on_at(self._deadline):
            await self.core.wait_until(lambda: self.sent_everything() and self.core.sends_done())
            if self.send_problem() is None and not self.farewell.acknowledged:
                self.control(wire.Goodbye())
                self.engine.watch_events()
                await self.core.wait_until(lambda: self.core.handle is None or self.farewell.acknowledged)
            with trio.move_on_after(DONE_TIMEOUT):
                self.engine.watch_events()
                await self.core.wait_until(lambda: self.core.handle is None or not self.farewell.peer_waits)
        undelivered = self.undelivered
        waiting_for = under_way(self.core.under_way()) if undelivered else ""
        error = self.core.error
        self.close_now()
        if undelivered and not self.told:
            if error is not None:
                reason = str(error)
            elif self.farewell.peer is Peer.SAID_GOODBYE:
                reason = "the peer closed the connection first"
            else:
                limit = f"close_timeout, {self.options.close_timeout} seconds"
                reason = f"the peer did not acknowledge within {limit}{waiting_for}"
            raise broken(f"closing: what was sent may not have been delivered: {reason}", error, self.core.origin)

    def lost(self) -> None:
        """Called by the endpoint when it has failed. Never raises."""
        if not contained(super().lost) and self.core.error is not None:
            self.end_waits(self.broken(f"the connection to {self.core.label} broke: {self.core.error}"))
        if self.control_socket is not None:
            contained(self.control_socket.abort)  # nothing can arrive over UCX any more: the peer need not wait for it

    def internal_error(self, error: BaseException) -> None:
        report(f"an internal error of trio_ucx, in the connection to {self.core.label}, which ends", error)
        contained(self.core.fail_inside, error)
        self.end_waits(broken(f"the connection to {self.core.label} broke: an internal error: {error!r}", error))

    def peer_left(self) -> None:
        error = UCXError(Status.CONNECTION_RESET, f"the peer {self.core.label} has closed")
        if self._pass_endpoint_on(error):
            self.lost()
        else:
            self.core.fail(error, linger=self.lingers)

    def _pass_endpoint_on(self, error: UCXError | None = None) -> bool:
        """Leaves the endpoint to another connection, if nothing was left at it. Returns whether it did."""
        if not self.core.reusable or self.keep_endpoint is None:
            return False
        self.keep_endpoint(self.core.pass_on(error))
        self.engine.watch_events()  # which also closes it when no other connection comes
        return True

    def queue_stopped(self, error: UCXError) -> None:
        """The worker's shared-memory queue has stopped. An endpoint that uses it has failed already."""

    def control_said(self, event: object) -> None:
        """An event from the control socket; after the exchange that can only be ABORT.

        Messages that the peer sent before may still be on their way over UCX: waits for them, for a moment.
        """
        self._aborted = True
        sent: int = getattr(event, "sent", 0)
        if self.inbound.received < sent:
            self.engine.spawn(lambda: self._cut_off_later(sent), f"trio_ucx abort of {self.core.label}")
        else:
            self.cut_off("aborted the connection")

    async def _cut_off_later(self, sent: int) -> None:
        deadline = trio.current_time() + ABORT_GRACE
        while self.core.handle is not None and self.inbound.received < sent and trio.current_time() < deadline:
            await trio.sleep(0.005)
        if self.engine.usable:
            try:
                self.cut_off("aborted the connection")
            except Exception as error:
                self.internal_error(error)

    def control_lost(self, reason: str, cause: BaseException | None = None) -> None:
        """The peer's end of the control socket was closed, or its host does not answer.

        Args:
            cause: the internal error that ended the control socket, if one did.
        """
        if cause is not None:
            self.internal_error(cause)
            return
        if self._aborted:
            return
        if self.farewell.peer is Peer.SAID_GOODBYE:
            self.peer_left()
        else:
            self.cut_off(f"ended or vanished: {reason}")

    def abort(self) -> None:
        """Closes by force, at once; the peer is told on the control socket."""
        # Undisturbed, so that who waits is told that we closed it, whatever the peer has done meanwhile.
        if not self.closed and self.engine.undisturbed(self._abort):
            self.engine.settle()

    def _abort(self) -> None:
        self.send_held()
        if self.control_socket is not None:
            self.control_socket.abort(self.outbound.sent)
        self.close_now()

    def close_now(self) -> None:
        """Lets go of everything."""
        if self.closed:
            return
        self.closing = self.closed = True
        self.engine.children.pop(self.my_id, None)
        self.core.on_close = None
        graceful = self.farewell.acknowledged or self.farewell.peer is Peer.SAID_GOODBYE
        if not (graceful and not self.undelivered and self._pass_endpoint_on()):
            self.core.close()
        if self.control_socket is not None:
            self.control_socket.close()
        self.engine.mail.boxes.pop(self.my_id, None)
        self.engine.mail.forget_rendezvous(self.inbound.threshold)
        self.let_go()
        live_handles.closed("connection")
        if self.on_closed is not None:
            self.on_closed()

    #: What the worker's closing calls; replaced by the Connection, which warns.
    on_unclosed: Callable[[], None] | None = None

    def unclosed(self) -> None:
        if self.on_unclosed is not None:
            self.on_unclosed()
        self.abort()
