"""Sending: messages, from the user's call to UCX. Credit and batches are C code's (``_native/link``).

A message goes one of three ways:

* The short way (:meth:`Sending.send_short`): C code sends bytes below the rendezvous threshold at once, or adds them to
  the batch. No object is made for them.
* At once: a :class:`SendOperation` pins the message and hands it to UCX.
* Later: the same, after it has waited for credit.
"""

from __future__ import annotations

from typing import Any

import trio
from outcome import Error, Outcome, Value

from .._native import ffi, lib
from .._rules import byte_stream as stream
from .._rules import wire
from .._rules.life import Answer, Life
from .._util.contained import contained
from ..ucp import Status
from ..ucp._internal_api import (
    Buffer,
    Operation,
    Pending,
    Pinned,
    UCXError,
    broken,
    is_short,
    pin,
)
from .message_port import MessagePort
from .native import NativeLink

_BATCHED, _WAITS, _ENDED = lib.TU_LINK_BATCHED, lib.TU_LINK_WAITS, lib.TU_LINK_ENDED


class Sending:
    """The sending half of a connection.

    Args:
        window: the peer's.
        threshold: longer messages stay here until the peer receives them; 0: none do.
    """

    def __init__(self, port: MessagePort, life: Life, native: NativeLink, window: int, threshold: int) -> None:
        self.port = port
        self.share = port.share
        self.ending = self.share.ending
        self.engine = port.engine
        self.life = life
        self.native = native
        self.window = window
        self.threshold = threshold
        self._links = self.engine.links
        self.tail: stream.Tail[SendOperation] = stream.Tail()
        #: The sends that wait for credit, in order.
        self.waiting: dict[SendOperation, None] = {}
        #: The waits for room.
        self.rooms: set[Room] = set()
        #: What the peer says about the message that it dropped first.
        self.dropped = ""
        #: Messages that were given to UCX, and whose task was cancelled before UCX was done with them; or that failed.
        self.cancelled = 0
        self.failed = 0
        #: Returns why nothing can be sent to a tag queue, if so: set by the channels.
        self.channel_problem: dict[int, Any] = {}

    def send_each(self) -> None:
        """Defers no message from now on."""
        lib.tu_link_send_each(self.native.handle)
        self._links.settle()

    def stays(self, size: int) -> bool:
        """True if a message of this size stays here until the peer receives it."""
        return 0 < self.threshold <= size

    # ---- whether ----

    def problem(self) -> Exception | None:
        """Returns why nothing can be sent, if so."""
        if self.life.sends is Answer.PEER_CLOSED:
            return broken("the peer closed the connection", self.share.error, self.ending.origin)
        return self.share.problem()

    @property
    def over(self) -> bool:
        """True if nothing can be sent any more: a wait until something can be sent ends."""
        return self.problem() is not None or not self.life.open

    def check(self) -> None:
        """Raises the reason why nothing can be sent, if there is one."""
        problem = self.problem()
        if problem is not None:
            self.ending.reported = True
            raise problem

    async def wait_room(self, number: int) -> None:
        """Waits until a small message could be sent, or would fail. Until then the peer knows that something waits."""
        while not self.over and lib.tu_link_may_send(self.native.handle, number, 1) == _WAITS:
            await self.engine.waiting.wait(Room(self, number))
        self._links.settle()

    # ---- the short way ----

    def send_short(self, number: int, data: Buffer) -> SendOperation | bool:
        """Sends ``bytes`` below the rendezvous threshold, or a short buffer, if nothing is in the way.

        Returns:
            False if something is: use :meth:`send`. True if the message was sent, or added to the batch. Else the
            operation, because UCX could not take it yet.
        """
        if type(data) is not bytes:
            if not is_short(data):
                return False
            data = bytes(data)
        size = len(data)
        if 0 < self.threshold <= size or (number == wire.STREAM and self.tail.pieces):
            return False
        verdict = lib.tu_link_send(self.native.handle, number, data, size)
        if self._links.news[0]:
            self._links.settle()
        if verdict in (0, _BATCHED):
            return True
        if verdict in (_WAITS, _ENDED):
            return False
        return self._keep(verdict, number, data)

    def expect_more(self) -> None:
        """A small message that is sent now is deferred: something closely follows it."""
        lib.tu_link_expect_more(self.native.handle)

    def write_short(self, data: memoryview) -> int:
        """Sends the first bytes of a write on the byte stream, as many as can be sent without waiting.

        The bytes are copied: that costs less than to pin the buffer, and to wait for UCX. Of ``LARGE_WRITE`` bytes and
        more none are sent.

        Returns:
            The number of bytes sent, or deferred for the batch.

        Raises: what :meth:`send_short` raises.
        """
        size = stream.small_piece(self.window)
        written = 0
        while written < len(data) < stream.LARGE_WRITE:
            piece = bytes(data[written : written + size])
            if not self.send_short(wire.STREAM, piece):
                break
            written += len(piece)
        return written

    def _keep(self, verdict: int, number: int, data: bytes) -> SendOperation:
        """UCX has not taken a message at once: it needs it for a while, or refuses it."""
        if verdict < 0:
            self._links.settle()
            error = self.share.error_of(verdict, "sending a message")
            self.refused(error)
            raise error
        try:
            send = self.engine.adopt(verdict, self._send_begun, number, data, verdict)
        except Exception:
            self.failed += 1
            self.ending.reported = True
            raise
        self.engine.submit()
        return send

    def _send_begun(self, number: int, data: bytes, id: int) -> SendOperation:
        send = SendOperation(self, number, Pinned(data))
        send.posted(id)
        return send

    def flush(self) -> None:
        """Sends the batch."""
        if self.native.handle is not None:
            lib.tu_link_flush(self.native.handle)
            self._links.settle()

    def internal_error(self, error: BaseException) -> None:
        """An exception in our own code: the connection ends. Never raises."""
        self.share.internal_error(error)

    # ---- the other ways ----

    def send(self, number: int, data: Buffer) -> SendOperation | None:
        """Sends a message now, or as soon as there is credit. Returns None when UCX has taken it already.

        Raises:
            trio.BrokenResourceError: nothing can be sent any more.
            TypeError, ValueError: not a buffer that can be sent.
            MemoryError: there is no memory for it; nothing was sent.
        """
        return self._send(number, data, waits=True)

    def send_nowait(self, number: int, data: Buffer) -> None:
        """Sends a message now.

        Raises:
            trio.WouldBlock: there is no credit.
            Others: as for :meth:`send`.
        """
        self._send(number, data, waits=False)

    def _send(self, number: int, data: Buffer, *, waits: bool) -> SendOperation | None:
        self.check()
        send = SendOperation(self, number, pin(self.engine, data))
        verdict = lib.tu_link_may_send(self.native.handle, number, send.size)
        self._links.settle()
        if verdict == 0:
            return send.post()
        try:
            if verdict == _WAITS and waits:
                return send.wait_for_credit()
            if verdict == _WAITS:
                raise trio.WouldBlock
            raise send.problem(verdict)
        except BaseException:
            send.release_unsent()
            raise

    def send_frame(self, frame: wire.Frame, *, later: bool = False) -> None:
        """Sends a control frame, which costs no credit; ``later``: with the batch, if it can be. Never raises."""
        if self.native.handle is not None:
            data = wire.encode_frame(frame)
            lib.tu_link_send_frame(self.native.handle, data, len(data), later)
            self._links.settle()

    def refused(self, error: Exception) -> None:
        """UCX has not taken a message; its task is told."""
        if isinstance(error, trio.BrokenResourceError):
            self.ending.reported = True

    # ---- the end ----

    def _in_flight(self) -> list[SendOperation]:
        return [operation for operation in self.share.operations.pending if isinstance(operation, SendOperation)]

    def finished(self) -> bool:
        """True if GOODBYE may be sent: what is still in flight was cancelled, or is lost."""
        if self.problem() is not None:
            return True
        if self.waiting:
            return False
        spare = self.tail.spare()
        return all(send.cancelled and (send.number != wire.STREAM or send in spare) for send in self._in_flight())

    def withdraw(self, number: int, error: Exception) -> None:
        """Ends the sends of a tag queue that wait for credit, or for room in it."""
        for send in [one for one in self.waiting if one.number == number]:
            send.withdraw(error)
        for room in [one for one in self.rooms if one.number == number]:
            room.due()
        self._links.settle()

    def dropped_there(self, queue: int, length: int) -> None:
        """DROPPED arrived: the peer could not receive a message."""
        self.failed += 1
        where = f"with tag {queue}" if queue <= wire.MAX_TAG else "in a conversation"
        self.dropped = self.dropped or (
            f"the peer has dropped a message of {length} bytes {where}: it exceeded the limit of the receive, or the "
            "peer lacked memory"
        )

    def fail_all(self, problem: Exception) -> None:
        """Ends all sends, because the connection has ended."""
        for send in self._in_flight():
            if send.outcome is None and not send.detached:
                send.finish(Error(problem))  # it waits for the peer to ask for it
                send.detach()
        for send in list(self.waiting):
            send.withdraw(problem)
        self.native.answers(sends_end=True)
        self.share.operations.changed()

    def end_waits(self, error: Exception) -> None:
        """Ends the sends that wait for credit, after an internal error. Never raises."""
        for send in list(self.waiting):
            contained(send.withdraw, error)

    @property
    def undelivered(self) -> bool:
        """True if something that was sent, and not cancelled, may not have reached the peer."""
        return bool(self.waiting) or self.life.undelivered(self.native.counts.sent, self.cancelled, self.failed)


class SendOperation(Operation):
    """A message on its way out: it waits for credit, then for UCX. Owns its buffer all the time."""

    __slots__ = ("_token", "cancelled", "number", "sending", "size")

    def __init__(self, sending: Sending, number: int, pins: Pinned) -> None:
        super().__init__(sending.engine, 0, pins, "sending a message", sending.share)
        self.sending = sending
        #: The tag queue, by the number that this side reads.
        self.number = number
        self.size = pins.size
        #: Whether its task was cancelled, so that nobody misses it if it does not arrive.
        self.cancelled = False
        #: What it waits with for credit.
        self._token: Any = None

    @property
    def waits_for_credit(self) -> bool:
        return not self.id and self.outcome is None

    @property
    def written(self) -> int:
        """The number of the tag queue that it writes to."""
        return wire.other_direction(self.number)

    def post(self) -> SendOperation | None:
        """Gives the message to UCX. Returns None when UCX has taken it.

        Raises:
            trio.BrokenResourceError, UCXError, MemoryError: it cannot be sent; its buffer and its credit are released.
        """
        sending = self.sending
        share = sending.share
        try:
            problem = share.problem()
            if problem is not None:
                raise problem
            assert self.pins is not None
            verdict = sending.port.send(self.written, self.pins)
            if verdict < 0:
                raise share.error_of(verdict, self.doing)
        except Exception as error:
            self.release_unsent()
            self._leave()
            sending.refused(error)
            raise
        if self._token is None:
            lib.tu_link_was_sent(sending.native.handle, self.number, self.size)
        else:
            del sending.waiting[self], sending.engine.links.waiting[self._token]
            token, self._token = self._token, None
            lib.tu_token_was_sent(token, self.size)
        stays = verdict > 0 and sending.stays(self.size)
        in_stream = self.number == wire.STREAM
        if not stays and in_stream:
            sending.tail.clear()
        if verdict == 0:
            self.release_unsent()
            return None
        sending.engine.adopt(verdict, self.posted, verdict)
        if stays and in_stream:
            sending.tail.add(self)
        sending.engine.submit()
        return self

    def wait_for_credit(self) -> SendOperation:
        """Waits for credit, in its turn.

        Raises:
            MemoryError: there is no memory for it.
        """
        token = lib.tu_link_wait_send(self.sending.native.handle, self.number, self.size)
        if token == ffi.NULL:
            raise MemoryError("no memory to wait for credit")
        self._token = token
        self.sending.waiting[self] = None
        self.sending.engine.links.waiting[token] = self
        self.sending.engine.links.settle()
        return self

    def due(self) -> None:
        """It may be sent, or will never be. Its outcome tells its task of an error."""
        verdict = lib.tu_token_may_send(self._token)
        if verdict == _WAITS or (verdict == _ENDED and self._channel_problem() is None):
            return  # if the connection has ended, fail_all follows, which knows why
        try:
            if verdict != 0:
                raise self.problem(verdict)
            if self.post() is None:
                self.finish(Value(None))
        except Exception as error:
            self.release_unsent()
            self._leave()
            self.finish(Error(error))
            if self.number == wire.STREAM:
                self.sending.withdraw(self.number, error)  # else there would be a hole
        self.sending.share.operations.changed()

    def problem(self, verdict: int) -> Exception:
        """Returns why it cannot be sent."""
        sending = self.sending
        if verdict != _ENDED:
            return sending.share.error_of(verdict, self.doing)
        return self._channel_problem() or sending.problem() or trio.ClosedResourceError("this connection was closed")

    def _channel_problem(self) -> Exception | None:
        channel = self.sending.channel_problem.get(self.number)
        return None if channel is None else channel()

    def release_unsent(self) -> None:
        """Releases the buffer, which UCX has not got, or does not need any more."""
        if self.pins is not None:
            self.pins.release()

    def _leave(self) -> None:
        """Waits for credit no more, if it does."""
        token, self._token = self._token, None
        if token is not None:
            self.sending.waiting.pop(self, None)
            self.sending.engine.links.waiting.pop(token, None)
            lib.tu_link_leave_send(token)

    def withdraw(self, error: Exception) -> None:
        """Ends it while it waits for credit."""
        try:
            self._leave()
            self.release_unsent()
        finally:
            self.finish(Error(error))

    def complete(self, status: int, length: int, tag: int) -> None:
        if status == Status.CONNECTION_RESET:  # UCX reports that of the endpoint in a moment, without saying why
            self.sending.share.fail(UCXError(status, self.doing))
        super().complete(status, length, tag)
        if status == Status.NO_MEMORY:
            self.sending.share.fail(UCXError(status, "sending the next piece of a message"))  # the peer waits for it

    def finish(self, result: Outcome[Any]) -> None:
        if self.id and self.outcome is None and isinstance(result, Error) and not self.cancelled:
            self.sending.failed += 1
        super().finish(result)

    def reported(self, error: BaseException) -> None:
        if self.id and not self.cancelled:
            self.sending.ending.reported = True  # whatever the error says
        else:
            super().reported(error)

    def cancel(self) -> bool:
        if self.outcome is not None:
            return True
        if self.id:
            self.sending.cancelled += 1
            self.cancelled = True
            self.detach()
        else:
            self._leave()
            self.release_unsent()
            self.sending.engine.links.settle()  # it may have been in others' way
        return True


class Room(Pending):
    """A wait until a small message could be sent."""

    __slots__ = ("_sending", "_token", "number")

    def __init__(self, sending: Sending, number: int) -> None:
        super().__init__()
        self._sending = sending
        self.number = number
        self._token = lib.tu_link_wait_send(sending.native.handle, number, 1)
        if self._token == ffi.NULL:
            raise MemoryError("no memory to wait for credit")
        sending.rooms.add(self)
        sending.engine.links.waiting[self._token] = self
        sending.engine.links.settle()

    def due(self) -> None:
        self.cancel()
        self.finish(Value(None))

    def cancel(self) -> bool:
        links = self._sending.engine.links
        self._sending.rooms.discard(self)
        if links.waiting.pop(self._token, None) is not None:
            lib.tu_link_leave_send(self._token)
            links.settle()
        return True

    def internal_error(self, error: BaseException) -> None:
        self._sending.internal_error(error)
