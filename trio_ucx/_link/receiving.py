"""Receiving: messages, from the engine's delivery to the user's call. Owns the tag queues, the transfers, the grants.

Small messages arrive packed: C code has received them, and they wait in their tag queue until they are taken. All
others are announced, and UCX holds them until a :class:`Transfer` brings them to memory: to a user's buffer, which its
:class:`PendingReceive` owns, or to fresh memory, which the transfer owns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import trio
from outcome import Error, Value

from .._errors import UnexpectedMessage
from .._native import lib
from .._rules import wire
from .._rules.credit import ReceiveCredit
from .._rules.life import Answer, Life, Peer
from .._rules.tag_queue import Message, MessageState, Receive, TagQueue, Want
from .._util.contained import contained
from ..ucp import Status
from ..ucp._internal_api import (
    Engine,
    MessageTooLong,
    Operation,
    Pending,
    Pinned,
    Signal,
    UCXError,
    WritableBuffer,
    about,
    is_about_a_part,
    new_bytes,
    pin,
)
from .buffers import PackedMessages, ReadBuffer
from .conversations import ChannelState, OpenChannels
from .message_port import MessagePort
from .sending import Sending
from .tag_queues import IDLE_QUEUES, TagQueues


class Receiving:
    """The receiving half of a connection: a ``ucp._engine.tag_dispatch.TagSink`` and a ``_rules.tag_queue.Mover``.

    Args:
        on_frame: called with each control frame.
        acknowledge: called when a transfer has ended and an ACK is owed.
    """

    def __init__(
        self,
        port: MessagePort,
        life: Life,
        sending: Sending,
        window: int,
        peer_threshold: int,
        max_message_size: int,
        *,
        on_frame: Callable[[wire.Frame], None],
        acknowledge: Callable[[], None],
    ) -> None:
        self.port = port
        self.share = port.share
        self.ending = self.share.ending
        self.engine = port.engine
        self.life = life
        self.credit = ReceiveCredit(window, peer_threshold)
        self.max_message_size = max_message_size
        self.queues = TagQueues(self, sending.credit)
        self.stream = ReadBuffer()
        self.bytes_received = 0
        #: Receives whose task is gone, and whose buffer a message is written to.
        self.detached_receives: set[Receive] = set()
        #: Messages that were dropped, and whose sender was not told yet.
        self._drops: list[wire.Dropped] = []
        #: The tag queues of each task that waits for a message in any of several; empty for all.
        self.any_waits: list[Collection[int]] = []
        #: The tag queue from which such a task was served last.
        self._served = -1
        self.conversations = OpenChannels(
            self.queues, sending, self.credit, end=self._end_unserved, announce=self._conversation_begun
        )
        self._sending = sending
        self._on_frame = on_frame
        self._acknowledge = acknowledge

    # ---- messages arrive ----

    def packed_arrived(self, number: int, count: int, length: int, data: bytes) -> None:
        """Small messages of one length arrived, one after the other in ``data``."""
        if self.life.receive_reported:
            return
        try:
            if count == 0:
                raise wire.ProtocolError(f"a message of {length} bytes that did not arrive in one piece")
            if number > wire.MAX_TAG:
                if number == wire.CONTROL:
                    self._on_frame(wire.decode_frame(data))
                    return
                wire.check_queue(number)
                if number == wire.STREAM:
                    self.life.stream_ended |= length == 0
                else:
                    self.conversations.arrived(number)
        except wire.ProtocolError as error:
            self._refuse(error)
            return
        queue = self.queues[number]
        self.credit.arrived(queue, length, count)
        self.bytes_received += len(data)
        if count == 1 and queue.receives and queue.give(data):
            consumed = 1
        else:
            consumed = queue.packed_arrived(PackedMessages(count, length, data))
            self.queues.filled.add(queue)
        if consumed and (amount := self.credit.consumed(length, consumed)):
            self._grant(amount)
        if queue.receives and self.credit.stalled:
            self._admit_next(queue)
        if consumed and len(self.queues) > IDLE_QUEUES:
            self.queues.forget_if_idle(queue)
        if self.any_waits:
            self.share.operations.changed()

    def message_arrived(self, number: int, handle: int, length: int) -> None:
        """A message was announced, and UCX holds it."""
        if self.life.receive_reported:
            self.port.discard(handle)
            return
        try:
            if number == wire.CONTROL:  # control frames are so small that C code receives them
                raise wire.ProtocolError(f"a control frame of {length} bytes")
            wire.check_queue(number)
            if number >= wire.CONVERSATIONS:
                self.conversations.arrived(number)
        except wire.ProtocolError as error:
            self.port.discard(handle)
            self._refuse(error)
            return
        queue = self.queues[number]
        self.credit.arrived(queue, length)
        self.bytes_received += length
        threshold = self.credit.threshold
        queue.arrived(handle, length, whole=length < threshold if threshold else None)
        self.queues.filled.add(queue)
        if self.credit.stalled:
            self._admit_next(queue)
        self.queues.forget_if_idle(queue)
        if self.any_waits:
            self.share.operations.changed()

    def _refuse(self, error: wire.ProtocolError) -> None:
        """Cuts off a peer that does not keep to the protocol."""
        failure = UCXError(Status.INVALID_PARAM, f"the peer was cut off: {error}")
        failure.__cause__ = error
        self.share.fail(failure)

    def internal_error(self, error: BaseException) -> None:
        """An exception in our own code: the connection ends. Never raises."""
        self.share.internal_error(error)

    # ---- the short way ----

    def take_ready(self, number: int, limit: int) -> bytes | None:
        """Takes the first message of a tag queue if it is in memory of ours, and has at most ``limit`` bytes.

        If none is there, looks for a small one.
        """
        queue = self.queues.get(number)
        if queue is None:
            return None
        packed = queue.packed
        if packed is None:
            message = queue.take_ready(limit)
            if message is not None:
                self.consumed(message)
                self.queues.forget_if_idle(queue)
                return message.contents
            if not queue.empty or self.credit.stalled or not self.engine.waiting.look():
                return None
            packed = queue.packed
            if packed is None:
                return None
        if packed.length > limit:
            return None
        data = packed.pop()
        if not packed.remaining:
            queue.next_packed()
            if queue.packed is None and len(self.queues) > IDLE_QUEUES:
                self.queues.forget_if_idle(queue)
        amount = self.credit.consumed(packed.length)
        if amount:
            self._grant(amount)
        return data

    # ---- receives ----

    def receive(self, number: int, want: Want, limit: int = 1 << 63) -> PendingReceive:
        """Queues a receive that has no buffer of the user's, and takes a message of at most ``limit`` bytes."""
        return self.wait(number, PendingReceive(self, want, None, limit))

    def prepare(self, buffer: WritableBuffer) -> PendingReceive:
        """A receive into a user's buffer, which it pins. Then :meth:`take_ready` for it, or :meth:`wait`.

        Raises:
            TypeError, ValueError: not a buffer to receive into.
        """
        # Small messages are in memory of ours first, so it must be possible to copy them to the buffer.
        pins = pin(self.engine, buffer, writable=True, copies=True)
        return PendingReceive(self, Want.INTO, pins, pins.size)

    def receive_suitable(self, number: int, target: ReceiveTarget) -> PendingReceive:
        """Queues a receive that takes the message only if the target wants it; else the message stays."""
        return self.wait(number, SuitableReceive(self, target))

    def wait(self, number: int, receive: PendingReceive) -> PendingReceive:
        """Queues a receive, which may complete at once. (The caller has checked that the connection is open.)"""
        queue = receive.queue = self.queues[number]
        queue.wait(receive)
        if receive.outcome is None:
            self._end_unserved(queue)
            if receive.outcome is None:
                self.queues.awaited.add(queue)
                self.found_empty(queue)
        self.queues.forget_if_idle(queue)
        return receive

    def take_begun(self) -> bytes | None:
        """Takes the number of a conversation that the peer has begun, if there is one."""
        queue = self.queues.get(wire.UNACCEPTED)
        if queue is None or queue.packed is None:
            return None
        data = queue.packed.pop()
        if not queue.packed.remaining:
            queue.next_packed()
        return data

    def receive_nowait(self, number: int, limit: int) -> bytes:
        """Takes the first message of a tag queue if it is there, and has at most ``limit`` bytes.

        Raises:
            trio.WouldBlock: it is not.
            Others: the peer has gone; the message is too long.
        """
        queue = self.queues.get(number)
        if queue is None or (queue.packed is None and queue.ready_now() is None):
            self.engine.reap()
            queue = self.queues.get(number)
        if queue is not None and queue.packed is not None:
            data = self.take_ready(number, limit)
            if data is not None:
                return data
        if queue is None or queue.ready_now() is None:
            if queue is None or not queue.messages:
                error = self._end_error(queue)
                if error is not None:
                    self._raises(error)
                    raise error
                self._admit((number,))
            raise trio.WouldBlock
        return cast(bytes, self.receive(number, Want.BYTES, limit).result())

    def next_piece(self) -> bytes | None:
        """Takes what is there of the byte stream: one message, or packed messages all at once."""
        queue = self.queues.get(wire.STREAM)
        if queue is None:
            return None
        packed = queue.packed
        if packed is None and not queue.messages:
            return None
        if packed is not None:
            count, data = packed.remaining, packed.pop_all()
            queue.next_packed()
            amount = self.credit.consumed(packed.length, count)
            if amount:
                self._grant(amount)
            return data
        if queue.ready_now() is None:
            return None
        return cast(bytes, self.receive(wire.STREAM, Want.BYTES).result())

    def cancelled(self, queue: TagQueue) -> None:
        """A receive has left a tag queue."""
        self._end_unserved(queue)
        self.queues.forget_if_idle(queue)

    # ---- any of several tag queues ----

    def next_number(self, numbers: Collection[int] | None) -> int | None:
        """Returns the next tag queue, in turn, with a message that no receive waits for; None if none has one."""
        if numbers is None:
            filled = self.queues.filled = {queue for queue in self.queues.filled if queue.unread}
            queues = [queue for queue in filled if queue.number <= wire.MAX_TAG]
        else:
            queues = [queue for number in numbers if (queue := self.queues.get(number)) is not None]
        ready = [queue.number for queue in queues if queue.has_spare]
        if not ready:
            return None
        self._served = min((number for number in ready if number > self._served), default=min(ready))
        return self._served

    def any_end(self, numbers: Collection[int] | None) -> Exception | None:
        """Returns what a receive from any of them gets when none has a message; None while one may arrive."""
        if numbers is None:
            return self._end_error(None)
        error: Exception | None = None
        for number in numbers:
            error = self._end_error(self.queues.get(number))
            if error is None:
                return None
        return error

    async def wait_any(self, numbers: Collection[int] | None) -> int:
        """Waits until one of the tag queues has a message that no receive waits for, and returns its number.

        Raises:
            Exception: none will have one.
        """
        found: int | None = None

        def over() -> bool:
            nonlocal found
            found = self.next_number(numbers)
            if found is None:
                self._admit(numbers or ())
            return found is not None or self.any_end(numbers) is not None or self.engine.broken is not None

        with self._awaiting(numbers):
            await self.share.operations.wait_until(over)
        if found is None:
            error = self.any_end(numbers)
            if error is None:
                self.engine.check()
            assert error is not None
            self._raises(error)
            raise error
        return found

    @contextmanager
    def _awaiting(self, numbers: Collection[int] | None) -> Iterator[None]:
        self.any_waits.append(numbers or ())
        try:
            yield
        finally:
            self.any_waits.remove(numbers or ())

    @contextmanager
    def watching(self, numbers: Collection[int], signal: Signal) -> Iterator[None]:
        """Sets the signal when a message may be there that no receive waits for, or :meth:`any_end` has changed."""
        self._admit(numbers)
        with self._awaiting(numbers), self.share.operations.watching(signal):
            yield

    # ---- conversations ----

    def _conversation_begun(self, number: int) -> None:
        self.queues[wire.UNACCEPTED].packed_arrived(PackedMessages(1, 4, number.to_bytes(4, "little")))

    # ---- grants ----

    def _grant(self, amount: int) -> None:
        self._sending.send_frame(wire.Grant(amount, self.credit.received))

    def found_empty(self, queue: TagQueue) -> None:
        """A receiver found the tag queue empty: if that is for want of credit, admits its next message."""
        if not self.credit.stalled or queue.number == wire.UNACCEPTED:
            return
        amount, admit = self.credit.found_empty(queue)
        if amount:
            self._grant(amount)
        if admit:
            self._sending.send_frame(wire.Admit(queue.number, self.credit.received))

    def _admit(self, numbers: Collection[int]) -> None:
        if self.credit.stalled:
            for number in numbers:
                self.found_empty(self.queues[number])

    def _admit_next(self, queue: TagQueue) -> None:
        """Admits the next message of a tag queue if a receive waits there for which no message has arrived."""
        if queue.lacks_messages:
            self.found_empty(queue)

    def peer_stalled(self, grants: int) -> None:
        """STALLED arrived, sent after so many grants."""
        granted = self.credit.peer_stalled(grants)
        if granted:
            self._grant(granted)
        awaited = self.queues.awaited = {queue for queue in self.queues.awaited if queue.receives}
        for queue in list(awaited):
            self._admit_next(queue)
        for numbers in self.any_waits:
            self._admit(numbers)

    # ---- what the tag queues ask ----

    def move(self, message: Message, receive: Receive | None) -> None:
        """See :class:`_rules.tag_queue.Mover`."""
        contents = None
        if receive is None:
            contents = new_bytes(message.length)
            pins = Pinned(contents)
        else:
            assert isinstance(receive, PendingReceive) and receive.pins is not None
            pins = receive.pins
        verdict = self.port.receive(message.handle, pins)
        if verdict == Status.NO_MEMORY:  # nothing has happened
            if contents is not None:
                pins.release()
            raise MemoryError(str(UCXError(verdict, "receiving a message")))
        message.handle = max(verdict, 0)
        message.contents = contents
        message.state = MessageState.READY if verdict == 0 else MessageState.MOVING
        if verdict > 0:
            self.engine.adopt(verdict, Transfer, self, verdict, message, pins)
            self.engine.submit()
            return
        if contents is not None:
            pins.release()
        if verdict < 0:
            self.transfer_ended(message, verdict)

    def transfer_ended(self, message: Message, status: int) -> None:
        """UCX has finished writing a message to memory, or will not."""
        error: Exception | None = None
        if status == Status.NO_MEMORY:
            self.share.fail(UCXError(status, "receiving the next piece of a message"))  # the peer sends it once only
        if status == Status.INVALID_PARAM and message.length > lib.TU_LONG:
            self._refuse(wire.ProtocolError("it sent a piece of a long message that does not fit"))
        queue = message.queue
        if status != Status.OK:
            doing = "receiving a message"
            if status == Status.CANCELED and message in queue.messages:  # else we have given it up
                self.life.broken_off = True
                doing = "the peer aborted the connection in the middle of a message"
            error = self.share.error_of(status, doing)
        queue.moved(message, error)
        if not self.life.closed:
            self._end_unserved(queue)
            self._admit_next(queue)
            self.queues.forget_if_idle(queue)
            if self.life.peer is Peer.CLOSING:
                self._acknowledge()

    def consumed(self, message: Message) -> None:
        """See :class:`_rules.tag_queue.Mover`."""
        if message.queue.number == wire.UNACCEPTED:
            return  # it was no message of the peer's
        amount = self.credit.consumed(message.length)
        if amount:
            self._grant(amount)

    def dropped(self, message: Message) -> None:
        """See :class:`_rules.tag_queue.Mover`."""
        self._drops.append(wire.Dropped(message.queue.number, message.length))
        self.report_drops()

    def report_drops(self) -> None:
        """Tells the sender of messages that were dropped; later, if there is no memory for that."""
        while self._drops:
            try:
                self._sending.post_frame(self._drops[0])
            except MemoryError:
                return
            self._drops.pop(0)

    def discard(self, message: Message) -> None:
        """See :class:`_rules.tag_queue.Mover`."""
        self.port.discard(message.handle)

    def give_up(self, message: Message) -> None:
        """See :class:`_rules.tag_queue.Mover`."""
        self.port.give_up(message.handle)

    def detached(self, receive: Receive, detached: bool) -> None:
        """See :class:`_rules.tag_queue.Mover`."""
        if detached:
            self.detached_receives.add(receive)
        else:
            self.detached_receives.discard(receive)
            self.share.operations.changed()

    # ---- the end ----

    def _end_error(self, queue: TagQueue | None) -> Exception | None:
        """Returns the exception for a receive on an empty tag queue; None while a message may still come."""
        if not self.life.open:
            return trio.ClosedResourceError("this connection was closed")
        if queue is not None and queue.failure is not None:
            return self.share.problem() or queue.failure  # a new one: each raise makes the traceback longer
        channel: ChannelState | None = None if queue is None else queue.channel
        if queue is not None and queue.number >= wire.CONVERSATIONS and (channel is None or channel.left):
            return trio.ClosedResourceError("this channel was closed")  # while the receive looked for a message
        if channel is not None and channel.peer_left:
            return channel.end()
        if self.life.receives is Answer.END:
            origin = self.ending.origin if channel is None else channel.origin
            return about(origin, trio.EndOfChannel("the peer closed the connection"))
        if self.life.draining and self.share.error is None and (queue is None or queue.number < wire.CONVERSATIONS):
            return about(self.ending.origin, trio.EndOfChannel("this server shuts down (Server.drain)"))
        return self.share.problem()

    def drain(self) -> None:
        """From now on receives end where nothing has arrived."""
        self.life.draining = True
        for queue in list(self.queues.values()):
            self._end_unserved(queue)
        self.share.operations.changed()

    def _end_unserved(self, queue: TagQueue) -> None:
        error = self._end_error(queue)
        if error is not None and queue.fail_unserved(error):
            self._failed(error)
        if self.any_waits:
            self.share.operations.changed()  # fewer receives wait there: a message may be left for another

    def _raises(self, error: Exception) -> None:
        """A call raises this error."""
        self.reported(error)
        self._failed(error)

    def reported(self, error: BaseException) -> None:
        """The user gets this error from a receive."""
        if isinstance(error, trio.BrokenResourceError) and not is_about_a_part(error):
            self.ending.reported = self.life.receive_reported = True

    def _failed(self, error: Exception) -> None:
        """Receives have ended with this error."""
        if isinstance(error, trio.BrokenResourceError) and not is_about_a_part(error):
            cause = error.__cause__
            if not self.life.peer_closes and isinstance(cause, UCXError):
                self.share.fail(cause)  # UCX has given up a message, and has not said that the endpoint failed

    def transferring(self) -> bool:
        """True if messages are being written to memory."""
        return any(queue.moving for queue in self.queues.values())

    def lacks(self, sent: int) -> bool:
        """True if not all data are here of the messages that the peer has sent, so many of them."""
        return self.credit.received < sent or self.transferring()

    def peer_ended(self, problem: Exception | None) -> None:
        """No message will arrive any more; ``problem``: the peer was lost."""
        gives_up = problem is not None and self.transferring()
        for queue in list(self.queues.values()):
            if problem is None:
                queue.drop_held()
            else:
                queue.lose(problem)
            self._end_unserved(queue)
            self.queues.forget_if_idle(queue)
        if gives_up:
            self.engine.submit()

    def end_waits(self, error: Exception) -> None:
        """Ends all receives, after an internal error. Never raises."""
        contained(self.conversations.connection_ended)
        for queue in list(self.queues.values()):
            if queue.receives:
                for receive in list(queue.receives):
                    contained(queue.give_up, receive, error)
                contained(queue.close, error)

    def stop(self, error: Exception) -> None:
        """The connection is about to close: ends all receives."""
        self.conversations.connection_ended()
        for queue in self.queues.values():
            for receive in list(queue.receives):
                queue.give_up(receive, error)

    def close(self, error: Exception) -> None:
        """The connection is closed: drops all messages."""
        gives_up = self.transferring()
        self.conversations.connection_ended()
        self.queues.close(error)
        if gives_up:
            self.engine.submit()


class PendingReceive(Pending):
    """A receive: a ``tag_queue.Receive``. Owns the user's buffer, if it has one, until it ends or is detached."""

    __slots__ = ("_receiving", "detached", "limit", "message", "pins", "queue", "want")

    queue: TagQueue

    def __init__(self, receiving: Receiving, want: Want, pins: Pinned | None, limit: int) -> None:
        super().__init__()
        self._receiving = receiving
        self.want = want
        self.pins = pins
        self.limit = limit
        self.message: Message | None = None
        self.detached = False

    def accept(self, contents: bytes) -> None:
        """Takes a message that is there, without having waited.

        Raises:
            RuntimeError: the device of the buffer failed.
        """
        try:
            self.fill(contents)
        finally:
            self.release()

    def fits(self, length: int) -> bool:
        return self.want is Want.INTO

    def look(self, contents: bytes | None) -> Exception | None:
        if contents is not None:
            self.fill(contents)
        return None

    def fill(self, contents: bytes) -> None:
        if self.pins is not None:
            self.pins.fill(memoryview(contents))

    def save(self, length: int) -> bytes:
        assert self.pins is not None
        return self.pins.copy(length)

    def succeed(self, value: Any) -> None:
        try:
            if self.pins is not None:
                self.pins.release()
        finally:
            self.finish(Value(value))

    def fail(self, error: Exception) -> None:
        if isinstance(error, MemoryError):
            about(self._receiving.ending.origin, error)  # the peer's message is too long for this process
        try:
            if not self.detached:
                self.release()
        finally:
            self.finish(Error(error))

    def fail_too_long(self, length: int) -> None:
        if self.want in (Want.INTO, Want.COPY):
            bound = "the buffer has"
        elif self.limit == self._receiving.max_message_size:
            bound = "max_message_size is"
        else:
            bound = "max_size is" if self.want is Want.BYTES else "the buffer has"
        text = f"a message of {length} bytes is too long, {bound} {self.limit}; it was dropped"
        self.fail(about(self._receiving.ending.origin, MessageTooLong(length, self.limit, text)))

    def release(self) -> None:
        if self.pins is not None:
            self.pins.release()

    def reported(self, error: BaseException) -> None:
        self._receiving.reported(error)

    def cancel(self) -> bool:
        self.queue.cancel(self)
        self._receiving.cancelled(self.queue)
        return True

    def internal_error(self, error: BaseException) -> None:
        self._receiving.internal_error(error)


class ReceiveTarget(Protocol):
    """Where a message goes that a receive looks at before it takes it. None of this may run code of the user's."""

    @property
    def pins(self) -> Pinned | None:
        """Returns the memory; None if messages are always copied out of memory of ours."""

    @property
    def value(self) -> Any:
        """Returns the value of the receive."""

    def fits(self, length: int) -> bool:
        """Returns True if a message of this length may be written to ``pins``."""

    def look(self, contents: bytes | None) -> Exception | None:
        """See :meth:`_rules.tag_queue.Receive.look`."""


class ExactTarget:
    """A buffer that a message must fill exactly: a :class:`ReceiveTarget`. Pins it.

    Raises:
        TypeError, ValueError: not a buffer to receive into.
    """

    def __init__(self, engine: Engine, buffer: WritableBuffer) -> None:
        self.pins = pin(engine, buffer, writable=True, copies=True)
        self.value = self.pins.size

    def fits(self, length: int) -> bool:
        return length == self.value

    def look(self, contents: bytes | None) -> Exception | None:
        if contents is not None:
            if len(contents) != self.value:
                return UnexpectedMessage(
                    f"a message of {len(contents)} bytes does not fill a buffer of {self.value} bytes: it was not taken"
                )
            self.pins.fill(memoryview(contents))
        return None


class SuitableReceive(PendingReceive):
    """A receive that looks at its message: ``Want.SUITABLE``."""

    __slots__ = ("_target",)

    def __init__(self, receiving: Receiving, target: ReceiveTarget) -> None:
        size = 0 if target.pins is None else target.pins.size
        super().__init__(receiving, Want.SUITABLE, target.pins, max(size, receiving.max_message_size))
        self._target = target

    def fits(self, length: int) -> bool:
        return self._target.fits(length)

    def look(self, contents: bytes | None) -> Exception | None:
        error = self._target.look(contents)
        return None if error is None else about(self._receiving.ending.origin, error)

    def succeed(self, value: Any) -> None:
        super().succeed(self._target.value)


class Transfer(Operation):
    """A message on its way into memory; owns that memory if it is fresh. Else the receive owns the buffer."""

    __slots__ = ("_memory", "_message", "_receiving")

    def __init__(self, receiving: Receiving, id: int, message: Message, pins: Pinned) -> None:
        super().__init__(receiving.engine, id, None, f"receiving {message.length} bytes from {receiving.share.label}")
        self._receiving = receiving
        self._message = message
        self._memory = None if message.contents is None else pins

    def complete(self, status: int, length: int, tag: int) -> None:
        self.release()
        if self._memory is not None:
            self._memory.release()
        self.finish(Value(None))
        self._receiving.transfer_ended(self._message, status)

    def worker_destroyed(self) -> None:
        super().worker_destroyed()
        if self._memory is not None:
            self._memory.release()
        self._receiving.transfer_ended(self._message, Status.CANCELED)

    def internal_error(self, error: BaseException) -> None:
        self._receiving.internal_error(error)
