"""Sending: messages, from the user's call to UCX. Owns the credit, the batch, and the tail of the byte stream.

A message goes one of three ways:

* The short way (:meth:`Sending.send_short`): bytes below the rendezvous threshold are sent at once, or added to the
  batch. No object is made for them.
* At once: a :class:`SendOperation` pins the message and hands it to UCX.
* Later: the same, after it has waited for credit.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, cast

import trio
from outcome import Error, Outcome, Value

from .._rules import byte_stream as stream
from .._rules import wire
from .._rules.batch import Batch
from .._rules.credit import SendCredit
from .._rules.life import Answer, Life
from .._rules.tag_queue import Mover, TagQueue
from .._rules.wire import SMALL_MESSAGE
from .._util.contained import contained
from ..ucp import Status
from ..ucp._internal_api import (
    DEFER_SECONDS,
    Buffer,
    Operation,
    Pinned,
    UCXError,
    broken,
    is_short,
    pending_send_of_bytes,
    pin,
)
from .message_port import MessagePort

#: The tag queue that batches are written to. No receive reads it: the peer takes each batch apart on arrival.
_BATCHES = TagQueue(wire.BATCH, cast(Mover, None))


class Sending:
    """The sending half of a connection."""

    def __init__(self, port: MessagePort, life: Life, peer_window: int, threshold: int) -> None:
        self.port = port
        self.share = port.share
        self.ending = self.share.ending
        self.engine = port.engine
        self.life = life
        self.credit: SendCredit[SendOperation] = SendCredit(peer_window, threshold)
        self.batch = Batch()
        self.tail: stream.Tail[SendOperation] = stream.Tail()
        #: What the peer says about the message that it dropped first.
        self.dropped = ""
        self.bytes_sent = 0
        #: Messages that were given to UCX, and whose task was cancelled before UCX was done with them; or that failed.
        self.cancelled = 0
        self.failed = 0
        #: Whether messages may be deferred: not if UCX would keep a batch here until the peer receives it, or split it.
        self._defers = not self.credit.stays(wire.MAX_BATCH)
        # When the last short message was sent, and how often the worker had made progress by then.
        self._sent_at = 0.0
        self._sent_count = 0

    def send_each(self) -> None:
        """Defers no message from now on."""
        self._defers = False

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

    def may_send(self, queue: TagQueue) -> bool:
        """True if a small message could be sent while the connection is not over; if not, the peer is told."""
        if self.credit.has_room(queue):
            return True
        self.report_stalled()
        return False

    # ---- the short way ----

    def send_short(self, queue: TagQueue, data: Buffer) -> SendOperation | bool:
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
        share = self.share
        if share.handle is None or self.life.sends is not Answer.GOES_ON:
            return False
        if self.tail.pieces and queue.stream:
            return False
        batch = self.batch
        small = size <= SMALL_MESSAGE
        if not small and batch.parts:
            self.send_batch()
            if share.handle is None or self.life.sends is not Answer.GOES_ON:
                return False
        if not self.credit.take_short(queue, size):
            return False
        self.bytes_sent += size
        if small:
            defer = True
            if not batch.parts:
                # Does it closely follow another? Not where its sender waited for anything in between.
                now = perf_counter()
                count = self.engine.progress_count
                defer = count == self._sent_count and now - self._sent_at < DEFER_SECONDS and self._defers
                self._sent_at = now
                self._sent_count = count
                if defer:
                    self.engine.batches.defer(self)
            if defer:
                full = batch.add(queue.written, data)
                # Other tasks may run for long before the hook before Trio's waits looks.
                if full or perf_counter() - self._sent_at > DEFER_SECONDS:
                    self.send_batch()
                return True
        verdict = self.port.send_bytes(queue.written, data)
        return True if verdict == 0 else self._keep(verdict, queue, data)

    def expect_more(self) -> None:
        """A small message that is sent now is deferred: something closely follows it."""
        self._sent_at, self._sent_count = perf_counter(), self.engine.progress_count

    def write_short(self, queue: TagQueue, data: memoryview) -> int:
        """Sends the first bytes of a write on the byte stream, as many as can be sent without waiting.

        The bytes are copied: that costs less than to pin the buffer, and to wait for UCX. Of ``LARGE_WRITE`` bytes and
        more none are sent.

        Returns:
            The number of bytes sent, or deferred for the batch.

        Raises: what :meth:`send_short` raises.
        """
        size = stream.small_piece(self.credit.window)
        written = 0
        while written < len(data) < stream.LARGE_WRITE:
            piece = bytes(data[written : written + size])
            if not self.send_short(queue, piece):
                break
            written += len(piece)
        return written

    def _keep(self, verdict: int, queue: TagQueue, data: bytes) -> SendOperation:
        """UCX has not taken a message, or a batch, at once: it needs it for a while, or refuses it."""
        if verdict < 0:
            error = self.share.error_of(verdict, "sending a message")
            if queue is _BATCHES:
                self.failed += 1  # the senders of its messages have gone on
            else:
                self.bytes_sent -= len(data)
                self.refused(queue, len(data), error)
            raise error
        try:
            send = self.engine.adopt(verdict, self._send_begun, queue, data, verdict)
        except Exception:
            self.failed += 1
            if queue is not _BATCHES:
                self.ending.reported = True
            raise
        self.engine.submit()
        return send

    def _send_begun(self, queue: TagQueue, data: bytes, id: int) -> SendOperation:
        send = SendOperation(self, queue, Pinned(data))
        send.posted(id)
        return send

    def send_batch(self) -> None:
        """See :class:`ucp._engine.batches.DeferredBatch`."""
        if not self.batch.parts:
            return
        share = self.share
        try:
            parts = self.batch.take()
            if share.handle is None:
                return
            self.engine.counters["batches"] += 1
            data = b"".join(parts)
            verdict = self.port.send_bytes(wire.BATCH, data)
            if verdict:
                self._keep(verdict, _BATCHES, data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, UCXError) as error:
            if share.error is None:
                share.fail(error if isinstance(error, UCXError) else UCXError(Status.IO_ERROR, str(error)))
            self.engine.reap_soon()
        except Exception as error:  # the sends of these messages have returned already
            self.internal_error(error)
            self.engine.reap_soon()

    def internal_error(self, error: BaseException) -> None:
        """An exception in our own code: the connection ends. Never raises."""
        self.share.internal_error(error)

    # ---- the other ways ----

    def send(self, queue: TagQueue, data: Buffer) -> SendOperation | None:
        """Sends a message now, or as soon as there is credit. Returns None when UCX has taken it already.

        Raises:
            trio.BrokenResourceError: nothing can be sent any more.
            TypeError, ValueError: not a buffer that can be sent.
            MemoryError: there is no memory for it; nothing was sent.
        """
        if self.batch.parts:
            self.send_batch()
        self.check()
        send = SendOperation(self, queue, pin(self.engine, data))
        if self.credit.take(queue, send.size):
            return send.post()
        self.credit.wait(send)
        self.report_stalled()
        return send

    def send_nowait(self, queue: TagQueue, data: Buffer) -> None:
        """Sends a message now.

        Raises:
            trio.WouldBlock: there is no credit.
            Others: as for :meth:`send`.
        """
        if self.batch.parts:
            self.send_batch()
        self.check()
        send = SendOperation(self, queue, pin(self.engine, data))
        if not self.credit.take(queue, send.size):
            send.release_unsent()
            self.report_stalled()
            raise trio.WouldBlock
        send.post()

    def send_waiting(self) -> None:
        """Sends what has waited for credit and may be sent now."""
        if self.credit.waiting and self.batch.parts:
            self.send_batch()
        while (send := self.credit.next_ready()) is not None:
            send.post_late()
        self.share.operations.changed()
        if self.credit.waiting:
            self.report_stalled()

    def report_stalled(self) -> None:
        if self.credit.must_report():
            self.send_frame(wire.Stalled(self.credit.grants))

    def send_frame(self, frame: wire.Frame) -> None:
        """Sends a control frame, which costs no credit. Never raises."""
        try:
            self.post_frame(frame)
        except Exception as error:  # else a peer that waits for this frame would wait for ever
            self.internal_error(error)

    def add_frame(self, frame: wire.Frame) -> None:
        """Sends a control frame that nobody waits for, with what is sent before the task waits. Never raises."""
        try:
            batch = self.batch
            if self.share.handle is None or not self._defers:
                self.post_frame(frame)
                return
            if not batch.parts:
                self.engine.batches.defer(self)
            if batch.add(wire.CONTROL, wire.encode_frame(frame)):
                self.send_batch()
        except Exception as error:  # as in send_frame
            self.internal_error(error)

    def post_frame(self, frame: wire.Frame) -> None:
        """Sends a control frame; raises MemoryError instead of ending the connection.

        Raises:
            MemoryError: there is no memory for it; it was not sent.
        """
        share = self.share
        if share.handle is not None and self.batch.parts:
            self.send_batch()
        if share.handle is None:
            return
        data = wire.encode_frame(frame)
        try:
            verdict = self.port.send_bytes(wire.CONTROL, data)
            if verdict < 0:
                raise share.error_of(verdict, "sending a message")
            if verdict:
                pending_send_of_bytes(self.engine, verdict, data, "sending a message", share)
        except (trio.BrokenResourceError, trio.ClosedResourceError, UCXError):
            pass  # the failure of the connection is reported elsewhere

    def refused(self, queue: TagQueue, size: int, error: Exception) -> None:
        """UCX has taken nothing of the message that was charged last; its task is told."""
        self.credit.take_back(queue, size)
        if isinstance(error, trio.BrokenResourceError):
            self.ending.reported = True

    # ---- the end ----

    def _in_flight(self) -> list[SendOperation]:
        return [operation for operation in self.share.operations.pending if isinstance(operation, SendOperation)]

    def finished(self) -> bool:
        """True if GOODBYE may be sent: what is still in flight was cancelled, or is lost."""
        if self.problem() is not None:
            return True
        if self.credit.waiting:
            return False
        spare = self.tail.spare()
        return all(send.cancelled and (not send.queue.stream or send in spare) for send in self._in_flight())

    def withdraw(self, queue: TagQueue, error: Exception) -> None:
        """Ends the sends of a tag queue that wait for credit, or for room in it."""
        if queue.waiting_sends:
            for send in list(queue.waiting_sends):
                send.withdraw(error)
            self.send_waiting()

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
        for send in list(self.credit.waiting):
            send.withdraw(problem)
        self.send_waiting()

    def end_waits(self, error: Exception) -> None:
        """Ends the sends that wait for credit, after an internal error. Never raises."""
        for send in list(self.credit.waiting):
            contained(send.withdraw, error)

    @property
    def undelivered(self) -> bool:
        """True if something that was sent, and not cancelled, may not have reached the peer."""
        return bool(self.credit.waiting) or self.life.undelivered(self.credit.sent, self.cancelled, self.failed)


class SendOperation(Operation):
    """A message on its way out: it waits for credit, then for UCX. Owns its buffer all the time."""

    __slots__ = ("cancelled", "queue", "sending", "size")

    def __init__(self, sending: Sending, queue: TagQueue, pins: Pinned) -> None:
        super().__init__(sending.engine, 0, pins, "sending a message", sending.share)
        self.sending = sending
        self.queue = queue
        self.size = pins.size
        #: Whether its task was cancelled, so that nobody misses it if it does not arrive.
        self.cancelled = False

    @property
    def waits_for_credit(self) -> bool:
        return not self.id and self.outcome is None

    def post(self) -> SendOperation | None:
        """Gives the message, which was charged last, to UCX. Returns None when UCX has taken it.

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
            verdict = sending.port.send(self.queue.written, self.pins)
            if verdict < 0:
                raise share.error_of(verdict, self.doing)
        except Exception as error:
            self.release_unsent()
            sending.refused(self.queue, self.size, error)
            raise
        sending.bytes_sent += self.size
        stays = verdict > 0 and sending.credit.stays(self.size)
        if not stays and self.queue.stream:
            sending.tail.clear()
        if verdict == 0:
            self.release_unsent()
            return None
        sending.engine.adopt(verdict, self.posted, verdict)
        if stays and self.queue.stream:
            sending.tail.add(self)
        sending.engine.submit()
        return self

    def post_late(self) -> None:
        """Posts a send that has waited for credit. Its outcome tells its task of an error."""
        try:
            if self.post() is None:
                self.finish(Value(None))
        except Exception as error:
            self.finish(Error(error))
            if self.queue.stream:
                self.sending.withdraw(self.queue, error)  # else there would be a hole

    def release_unsent(self) -> None:
        """Releases the buffer, which UCX has not got, or does not need any more."""
        if self.pins is not None:
            self.pins.release()

    def withdraw(self, error: Exception) -> None:
        """Ends it while it waits for credit."""
        try:
            self.sending.credit.withdraw(self)
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
            self.sending.credit.withdraw(self)
            self.release_unsent()
            self.sending.send_waiting()  # it may have been in others' way
        return True
