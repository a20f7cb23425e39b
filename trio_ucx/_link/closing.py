"""Closing: the close handshake, and what is done when the peer has closed, was lost, or misbehaves.

The graceful close
==================

1. Wait for our own sends; UCX's flush does not count rendezvous messages that the peer has not asked for. If they are
   not over, STOP tells the peer first that we receive nothing any more.
2. Send GOODBYE and wait for ACK, which the peer's library sends. Flushed means, over TCP, handed to the kernel, which
   drops it when we close with unread input; acknowledged means that it has arrived.
3. If the peer has sent GOODBYE, too, stay until it has our ACK (``_rules.life`` says why).
4. Leave the endpoint. The last connection that does so keeps it for a moment if nothing was left there, and else closes
   it by force. (UCX's own graceful close cannot be given up, and would hang on a stopped peer.)

All within ``close_timeout``. When the closing task is cancelled, a system task goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

import trio

from .._errors import PeerClosed, PeerLost
from .._rules import wire
from .._rules.life import Life, Loss, Peer, PeerEvent
from .._util.contained import contained, report
from .._util.live_handles import live_handles
from .._util.process import has_ended
from ..ucp import Status
from ..ucp._internal_api import CloseState, UCXError, about, broken, internal_failure, under_way
from .message_port import MessagePort
from .native import NativeLink
from .receiving import Receiving
from .sending import Sending

#: Seconds to wait until a peer that has sent GOODBYE has our ACK.
DONE_TIMEOUT = 1.0
#: Seconds to wait for what a peer had sent over UCX before it ended or aborted, and for transfers that are under way
#: then.
ABORT_GRACE = 0.5


class ControlSocket(Protocol):
    """Tells the peer, and us, that the other side has gone."""

    def abort(self, sent: int = 0) -> None:
        """Tells the peer that this side closes by force, after so many messages over UCX, and closes the socket."""

    def look(self) -> None:
        """Handles what has arrived there, now."""

    def close(self) -> None:
        """Closes."""


class Closing:
    """The end of a connection.

    Args:
        close_timeout: seconds for the graceful close.
        unregister: called once, when the connection has left the endpoint: the engine forgets the connection.
    """

    def __init__(
        self,
        port: MessagePort,
        life: Life,
        native: NativeLink,
        sending: Sending,
        receiving: Receiving,
        close_timeout: float,
        unregister: Callable[[], None],
    ) -> None:
        self.share = port.share
        self.ending = self.share.ending
        self.engine = port.engine
        self.life = life
        self._native = native
        #: Tells that the peer aborted, ended or vanished.
        self.control_socket: ControlSocket | None = None
        #: Called when the connection has been closed.
        self.on_closed: Callable[[], None] | None = None
        self._sending = sending
        self._receiving = receiving
        self._timeout = close_timeout
        self._deadline = math.inf
        self._unregister = unregister
        self.ending.origin.lost = self._lost_error
        #: What :meth:`finish` has raised.
        self._failure = ""
        #: When the peer has closed, or was lost.
        self.peer_ended_at: float | None = None

    # ---- the handshake ----

    def stop_arrived(self) -> None:
        self.life.happened(PeerEvent.STOP)
        self._end_sends()

    def goodbye_arrived(self) -> None:
        self.life.happened(PeerEvent.GOODBYE)
        self._end(None)
        self.acknowledge()

    def ack_arrived(self) -> None:
        self.life.acknowledged = True
        self._sending.send_frame(wire.Done())
        self.share.operations.changed()

    def done_arrived(self) -> None:
        self.life.happened(PeerEvent.DONE)
        self.share.operations.changed()
        if self.life.peer_closes and self.life.open:
            self._peer_closed()

    def acknowledge(self) -> None:
        """Sends ACK if it is owed, and no transfer from the peer is in flight."""
        if self.life.peer is Peer.CLOSING and not self._receiving.transferring():
            self.life.happened(PeerEvent.ACK_SENT)
            self._sending.send_frame(wire.GoodbyeAck())
            self.share.operations.changed()

    def _end(self, loss: Exception | None) -> None:
        """The peer has sent GOODBYE, or was lost: ends what waits for it."""
        self.peer_ended_at = self.peer_ended_at or perf_counter()
        self._receiving.peer_ended(loss)
        self._end_sends()

    def _end_sends(self) -> None:
        problem = self._sending.problem()
        assert problem is not None
        self._sending.fail_all(problem)
        self._receiving.conversations.connection_ended()

    # ---- the graceful close ----

    def begin(self) -> None:
        """From here on the user can do nothing with the connection any more: waiting receives end."""
        self.ending.begin_close()
        error = trio.ClosedResourceError("this connection was closed")
        self._receiving.stop(error)
        # Messages that wait for credit are waited for. A write to the byte stream ends, as in Trio.
        self._sending.withdraw(wire.STREAM, error)
        self.share.operations.changed()
        if not self._sending.finished():
            self._sending.send_frame(wire.Stop())

    async def close_gracefully(self) -> None:
        """Does the handshake, then closes; by force at the deadline. Can be cancelled, and called again.

        Raises:
            trio.BrokenResourceError: what was sent may not have been delivered.
        """
        share, operations = self.share, self.share.operations
        self._deadline = min(self._deadline, trio.current_time() + self._timeout)
        with trio.move_on_at(self._deadline):
            await operations.wait_until(self.may_say_goodbye)
            if self.say_goodbye():
                self.engine.watch_events()
                await operations.wait_until(lambda: share.gone or self.life.acknowledged)
            with trio.move_on_after(DONE_TIMEOUT):
                self.engine.watch_events()
                await operations.wait_until(self.peer_is_done)
        self.finish()

    def may_say_goodbye(self) -> bool:
        return self._sending.finished() and self.share.operations.sends_done()

    def say_goodbye(self) -> bool:
        """Sends GOODBYE, and returns whether that makes sense."""
        if self.life.graceful or self.share.problem() is not None:
            return False
        self._sending.send_frame(wire.Goodbye())
        return True

    def peer_is_done(self) -> bool:
        """True if the peer does not wait for anything from us."""
        return self.share.gone or not self.life.peer_waits

    def finish(self) -> None:
        """Closes, by force if the handshake is not over.

        Raises:
            trio.BrokenResourceError: what was sent may not have been delivered, and nobody was told yet.
        """
        undelivered = self._sending.undelivered
        waiting_for = under_way(self.share.operations.in_order()) if undelivered else ""
        error, reported = self.share.error, self.ending.reported
        if self.life.graceful:
            self.close_now()
            self.engine.reap()
        else:
            if error is None and not self.life.peer_stopped:
                self.life.reason = self.life.reason or "unresponsive"
            self.abort()
        if undelivered and not reported:
            if self._sending.dropped:
                reason = self._sending.dropped
            elif error is not None:
                reason = str(error)
            elif self.life.peer_stopped:
                reason = "the peer closed the connection first"
            else:
                limit = f"close_timeout, {self._timeout} seconds"
                reason = f"the peer did not acknowledge within {limit}{waiting_for}"
            self._failure = f"closing: what was sent may not have been delivered: {reason}"
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raises what the close has raised, again.

        Raises:
            trio.BrokenResourceError: what was sent may not have been delivered.
        """
        if not self._failure:
            return
        origin = self.ending.origin
        if self._sending.dropped:  # the peer is well
            raise about(origin, trio.BrokenResourceError(self._failure))
        raise broken(self._failure, self.share.error, origin)

    # ---- the peer has gone ----

    def _lost_error(self, text: str) -> trio.BrokenResourceError:
        """The exception for using the connection after the peer has closed it, or is lost."""
        if self.life.peer_stopped:
            return PeerClosed(text)
        self._find_reason()
        error = PeerLost(text)
        error.reason = self.life.reason or "broken"
        return error

    def _find_reason(self) -> None:
        """Looks how the peer was lost, if only UCX has said yet that it is."""
        if not self.life.reason and self.share.error is not None and self.control_socket is not None:
            contained(self.control_socket.look)
        if not self.life.reason and self.engine.broken is None:
            address = self.share.peer_address
            if address is not None and has_ended(address.process):
                self.life.reason = "ended"
            elif self.life.broken_off:
                self.life.reason = "aborted"

    def cut_off(self, kind: str, reason: str) -> None:
        """The peer cannot be reached any more.

        Args:
            kind: see ``PeerLost.reason``.
        """
        self.life.reason = kind
        error = UCXError(Status.CONNECTION_RESET, f"the peer {reason}")
        self.share.fail(error)

    def ended(self) -> None:
        """The endpoint was closed, or the share has failed."""
        error = self.ending.broken(self.share.label)
        if error is None:
            self.close_now()
            return
        if not contained(self._lost):
            self._end_waits(error)
        if self.control_socket is not None:
            contained(self.control_socket.abort)  # nothing can arrive over UCX any more: the peer need not wait for it

    def _lost(self) -> None:
        if self.life.closed:
            return
        self.life.happened(PeerEvent.GONE)
        self._end(self.share.problem())
        self.share.operations.changed()

    def _peer_closed(self) -> None:
        """The peer has closed, and has our ACK: lets go of what it did not take."""
        error = UCXError(Status.CONNECTION_RESET, "the peer has closed")
        self.share.fail(error, left_clean=self._left_nothing())

    def _left_nothing(self) -> bool:
        """True if UCX writes to no memory of this connection, so that another one can go on with its endpoint."""
        return not self._receiving.detached_receives and not self._receiving.transferring()

    def peer_aborted(self, sent: int = 0, refusal: str = "") -> None:
        """The peer has closed by force: the control socket says so.

        Args:
            sent: how many messages it had sent before. They may still be on their way over UCX, and sends have returned
                whose data are: waits for them, for a moment.
            refusal: it is a listener, which does not let this side in after all; in words.
        """
        self.life.abort_arrived = True
        if self.life.graceful:
            self._peer_closed()
            return
        self.life.reason = "aborted"
        self._cut_off_when(
            lambda: not self._receiving.lacks(sent),
            "aborted",
            f"refused the connection: {refusal}" if refusal else "aborted the connection",
        )

    def _cut_off_when(self, arrived: Callable[[], bool], kind: str, reason: str) -> None:
        """Cuts off a peer that has gone, when what it had sent over UCX has arrived; after a moment at the latest."""

        async def wait() -> None:
            deadline = trio.current_time() + ABORT_GRACE
            while not self.share.gone and not arrived() and trio.current_time() < deadline:
                await trio.sleep(0.005)
            if self.engine.usable:
                try:
                    self._peer_closed() if self.life.graceful else self.cut_off(kind, reason)
                except Exception as error:
                    self.internal_error(error)

        if arrived():
            self.cut_off(kind, reason)
        else:
            self.engine.run.spawn(wait, f"trio_ucx end of {self.share.label}")

    def control_lost(self, loss: Loss) -> None:
        """The peer's end of the control socket was closed, or its host does not answer."""
        if loss.cause is not None:
            self.internal_error(loss.cause)
        elif not self.life.abort_arrived:
            if self.life.graceful:
                self._peer_closed()
            elif loss.vanished:
                self.cut_off("vanished", f"has vanished: {loss.reason}")
            else:
                # It may have closed in good order: its ACK can arrive later than the end of its control socket.
                reason = f"has ended, or was cut off: {loss.reason}"
                self._cut_off_when(lambda: self.life.graceful or not self.life.closing, "ended", reason)

    # ---- by force ----

    def internal_error(self, error: BaseException) -> None:
        """Ends the connection, and no other, after an exception in our own code. Never raises."""
        report(f"an internal error of trio_ucx, in the connection to {self.share.label}, which ends", error)
        contained(self.share.fail, internal_failure(error))
        self._end_waits(broken(f"the connection to {self.share.label} broke: an internal error: {error!r}", error))

    def _end_waits(self, error: Exception) -> None:
        """Ends all waits, because the connection cannot go on. Never raises."""
        self._receiving.end_waits(error)
        self._sending.end_waits(error)
        contained(self.share.operations.changed)

    def abort(self) -> None:
        """Closes by force, at once; the peer is told on the control socket."""
        if self.life.closed:
            return
        self._sending.flush()
        if self.control_socket is not None:
            self.control_socket.abort(self._native.counts.sent)
        self.close_now()
        self.engine.reap()

    def give_up(self) -> None:
        """Leaves the endpoint, because the connection will not open; other connections may go on using it."""
        self.share.close(left_clean=self.share.endpoint.proven and self._left_nothing())
        self.close_now()

    def close_now(self) -> None:
        """Leaves the endpoint, and ends everything that waits. Closed already: no effect."""
        if self.life.closed:
            return
        self.ending.state = CloseState.CLOSED
        self.share.close(left_clean=self.life.graceful and not self._sending.undelivered and self._left_nothing())
        if self.control_socket is not None:
            self.control_socket.close()
        self._unregister()
        error = trio.ClosedResourceError("this connection was closed")
        self._receiving.stop(error)
        self._sending.fail_all(error)
        self._native.close()
        self._receiving.give_up_dropped()
        self.engine.links.settle()
        self.share.operations.changed()
        live_handles.closed("connection")
        if self.on_closed is not None:
            self.on_closed()
