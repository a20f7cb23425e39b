"""Receiving: messages, from the engine's delivery to the user's call. Owns the receives that wait, and the transfers.

Messages wait in the tag queues of C code (``_native/link``) until they are taken. Small ones are in memory of ours.
UCX holds all others until a :class:`Transfer` brings them to memory: to memory of C code at once if UCX has the whole
message, otherwise to the buffer of a :class:`PendingReceive`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from time import perf_counter
from typing import Any, Protocol, cast, overload

import trio
from outcome import Error, Value

from .._errors import UnexpectedMessage
from .._native import ffi, lib
from .._rules import wire
from .._rules.life import Answer, Life, Peer
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
    completed,
    is_about_a_part,
    new_bytes,
    pin,
)
from .conversations import OpenChannels
from .message_port import MessagePort
from .native import NativeLink
from .sending import Sending

#: More than any message has: no limit.
ANY_LENGTH = 1 << 62

_EMPTY, _ENDED, _TOO_LONG = lib.TU_LINK_EMPTY, lib.TU_LINK_ENDED, lib.TU_LINK_TOO_LONG
_BEGIN, _SAVE = lib.TU_LINK_BEGIN, lib.TU_LINK_SAVE
_OUT = lib.TU_LINK_OUT
_wait, _take = lib.tu_link_wait, lib.tu_link_take
_OVER = (True,)
#: What the limit of a receive is, in words.
BUFFER = "the buffer has"


class Want(Enum):
    """What a receive wants of its message."""

    BYTES = auto()
    INTO = auto()
    LENGTH = auto()  # wait_message: does not take the message
    SUITABLE = auto()  # into a buffer, if the receive wants it: else the message stays


class Receiving:
    """The receiving half of a connection: a ``ucp._engine.tag_dispatch.TagSink``.

    Args:
        peer_threshold: longer messages stay with the peer until they are received; 0: none do.
        on_frame: called with each control frame that is not C code's.
        acknowledge: called when a transfer has ended and an ACK is owed.
    """

    def __init__(
        self,
        port: MessagePort,
        life: Life,
        native: NativeLink,
        sending: Sending,
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
        self.native = native
        self.max_message_size = max_message_size
        self.stream = ReadBuffer()
        #: The receives that wait, in order.
        self.waiting: dict[PendingReceive | NextMessage, None] = {}
        #: Messages on their way to memory.
        self.transfers: dict[Transfer, None] = {}
        #: Receives whose task is gone, and whose buffer a message is written to.
        self.detached_receives: set[PendingReceive] = set()
        #: The tag queues of each task that waits for a message in any of several; empty for all.
        self.any_waits: list[Collection[int]] = []
        #: By tag queue: a message of it could not be received, and it has ended.
        self.failures: dict[int, Exception] = {}
        self.conversations = OpenChannels(native, sending, end_error=self._end_error, changed=self._channels_changed)
        #: Where C code writes the tag queue of a message.
        self.number = ffi.new("uint32_t *")
        self._links = self.engine.links
        self._sending = sending
        self._threshold = peer_threshold
        #: The tag queue from which a task that waits in several was served last.
        self._served = -1
        self._on_frame = on_frame
        self._acknowledge = acknowledge
        #: Whether the last message was waited for. Then the next will most probably be, too, and it is no use to look
        #: for it first.
        self.slept = False
        #: Where C code writes which message is fetched, and to where.
        self._item = ffi.new("tu_item_t **")
        self._place = ffi.new("char **")
        #: Why a message could not be saved out of a buffer of the user's.
        self._unsaved: Exception | None = None

    # ---- messages arrive ----

    def packed_arrived(self, number: int, count: int, length: int, data: Any) -> None:
        """Small messages of one length arrived, one after the other in ``data``."""
        if self.life.receive_reported:
            return
        try:
            if count == 0:
                raise wire.ProtocolError(f"a message of {length} bytes that did not arrive in one piece")
            if number > wire.MAX_TAG:
                if number == wire.CONTROL:
                    self._control_arrived(length, data)
                    return
                self._check(number)
                if number == wire.STREAM:
                    self.life.stream_ended |= length == 0
            status = lib.tu_link_arrived(self.native.handle, number, length, count, data)
            if status:
                self._took(status)
        except wire.ProtocolError as error:
            self._refuse(error)
            return
        if self.any_waits:
            self.share.operations.changed()

    def _control_arrived(self, length: int, data: Any) -> None:
        status = lib.tu_link_arrived(self.native.handle, wire.CONTROL, length, 1, data)
        if status == 1:
            self._on_frame(wire.decode_frame(ffi.buffer(data, length)[:]))
        elif status == Status.INVALID_PARAM:
            raise wire.ProtocolError(f"a control frame that says what cannot be: {ffi.buffer(data, length)[:].hex()}")
        for numbers in self.any_waits:
            self._admit(numbers)

    def message_arrived(self, number: int, handle: int, length: int) -> None:
        """A message was announced, and UCX holds it."""
        if self.life.receive_reported:
            self.port.discard(handle)
            return
        whole = self.is_whole(length)
        fetches = whole or not self._threshold
        try:
            if number == wire.CONTROL:  # control frames are so small that C code receives them
                raise wire.ProtocolError(f"a control frame of {length} bytes")
            self._check(number)
            native = self.native.handle
            if fetches:
                status = lib.tu_link_fetch(native, number, handle, length, whole, self._item, self._place)
            else:
                status = lib.tu_link_announced(native, number, handle, length, whole)
            taken = self._took(status)
        except wire.ProtocolError as error:
            self.port.discard(handle)
            self._refuse(error)
            return
        if not taken:
            self.port.discard(handle)
            return
        if fetches and self._item[0]:
            self._fetch(self._item[0], number, handle, length)
        self._links.settle()  # a receive that waits for it begins its transfer
        if self.any_waits:
            self.share.operations.changed()

    def is_whole(self, length: int) -> bool:
        """True if UCX is known to have all of a message of this length when it has arrived."""
        return self._threshold > 0 and length < self._threshold

    def _check(self, number: int) -> None:
        """Refuses a tag queue that a peer may not use. If it is a conversation, it may begin."""
        wire.check_queue(number)
        if number >= wire.CONVERSATIONS:
            self.conversations.arrived(number)

    def _took(self, status: int) -> bool:
        """True if C code has taken a message; False if it was dropped: nobody waits for it, or there is no memory.

        Raises:
            wire.ProtocolError: the peer must not send it.
        """
        if status == Status.INVALID_PARAM:
            raise wire.ProtocolError("it sends more than this side has granted")
        return status == 0

    def link_broke(self, status: int) -> None:
        """See :class:`ucp._engine.tag_dispatch.TagSink`."""
        self.share.fail(UCXError(status, "keeping the messages of a connection"))

    def _refuse(self, error: wire.ProtocolError) -> None:
        """Cuts off a peer that does not keep to the protocol."""
        failure = UCXError(Status.INVALID_PARAM, f"the peer was cut off: {error}")
        failure.__cause__ = error
        self.share.fail(failure)

    def internal_error(self, error: BaseException) -> None:
        """An exception in our own code: the connection ends. Never raises."""
        self.share.internal_error(error)

    # ---- the short way ----

    def take_ready(self, number: int, limit: int, bound: str = "", *, looks: bool = True) -> bytes | None:
        """Takes the first message of a tag queue if it is in memory of ours.

        Args:
            bound: what the limit is, in words; by default, the user's or the connection's ``max_size``.
            looks: if none is there, look for a small one.

        Raises:
            MessageTooLong: it has more than ``limit`` bytes; it was dropped.
            MemoryError: there was no memory for it; it was dropped.
        """
        length = lib.tu_link_receive(self.native.handle, number, limit, False)
        if length == _EMPTY and looks and not self.slept and self.engine.waiting.look():
            length = lib.tu_link_receive(self.native.handle, number, limit, False)
        if length >= 0:
            data = self.taken(number, length)
            if self._links.news[0]:
                self._links.settle()
            return data
        if length != _EMPTY and length != _ENDED:
            self._links.settle()
            raise self.lost_message(length, limit, bound)
        return None

    def look(self, number: int) -> bytes | None:
        """Returns the first message of a tag queue, which stays; None if it is not in memory of ours."""
        if self.native.handle is None:
            return None
        length = lib.tu_link_receive(self.native.handle, number, ANY_LENGTH, True)
        return self.looked_at(length) if length >= 0 else None

    def looked_at(self, length: int) -> bytes:
        """Returns the bytes of a message that was taken, or stays."""
        return cast(bytes, ffi.unpack(lib.tu_links_taken(self._links.native), length))

    def taken(self, number: int, length: int) -> bytes:
        """Returns the bytes of a message that was taken.

        Raises:
            MemoryError: there is no memory for it; it was dropped.
        """
        if length <= _OUT:
            return cast(bytes, ffi.unpack(self._links.out, length))
        try:
            contents = new_bytes(length)
        except MemoryError:
            self._sending.send_frame(wire.Dropped(number, length))
            text = f"there is no memory for a message of {length} bytes: it was dropped"
            raise about(self.ending.origin, MemoryError(text)) from None
        ffi.memmove(ffi.from_buffer("char[]", contents), lib.tu_links_taken(self._links.native), length)
        return contents

    def lost_message(self, verdict: int, limit: int, bound: str = "") -> Exception:
        """Returns the error of a receive whose message was dropped.

        Args:
            bound: what the limit is, in words; by default, the user's or the connection's ``max_size``.
        """
        if verdict == _TOO_LONG:
            return self.too_long(lib.tu_links_length(self._links.native), limit, bound)
        error, self._unsaved = self._unsaved, None
        return error or about(self.ending.origin, MemoryError("there is no memory for a message: it was dropped"))

    def too_long(self, length: int, limit: int, bound: str = "") -> MessageTooLong:
        bound = bound or ("max_message_size is" if limit == self.max_message_size else "max_size is")
        text = f"a message of {length} bytes is too long, {bound} {limit}; it was dropped"
        return about(self.ending.origin, MessageTooLong(length, limit, text))

    # ---- receives ----

    @overload
    async def next(self, number: int, limit: int, *, bound: str = "") -> bytes: ...
    @overload
    async def next(self, number: int, limit: int, large: PendingReceive, *, bound: str = "") -> bytes | int: ...
    async def next(
        self, number: int, limit: int, large: PendingReceive | None = None, *, bound: str = ""
    ) -> bytes | int:
        """Waits for the next message of a tag queue, of at most ``limit`` bytes, and takes it.

        Args:
            large: receives the message if UCX has it still. If it does not come to that, it stays the caller's.
            bound: as for :meth:`take_ready`.

        Returns:
            The message, or its length if ``large`` has received it.

        Raises: as :meth:`Connection.receive`.
        """
        links, waiting = self._links, self.engine.waiting
        channel = self.conversations.channels.get(number)
        if number >= wire.CONVERSATIONS and channel is None:
            await waiting.schedule_point()
            raise self.end_error(number)  # its channel was left while the caller looked for a message
        self.number[0] = number
        token = _wait(self.native.handle, self.number, 1)
        if token == ffi.NULL:
            raise MemoryError("no memory to wait for a message")
        wait = links.waiting[token] = NextMessage(self, number, token)
        self.waiting[wait] = None
        if channel is not None:
            self.conversations.waits.setdefault(number, []).append(wait)
        waited = False
        try:
            while (verdict := _take(token, limit, False, self.number)) == _EMPTY:
                await waiting.wait(wait)
                waited = True
                if wait.error is not None:
                    if waiting.polled:  # a cancellation comes first
                        await trio.lowlevel.checkpoint_if_cancelled()
                    raise wait.error
            if verdict != _BEGIN:
                wait.token = None  # C code has forgotten it
        except BaseException as error:
            wait.leave()
            links.settle()
            self.receive_left()
            if isinstance(error, Exception):
                self._raises(error)
            raise
        finally:
            if channel is not None:
                self.conversations.waits_no_more(number, wait)
        if verdict == _BEGIN:  # the same token goes on, with memory for the message
            del self.waiting[wait]
            receive = PendingReceive(self, Want.BYTES, None, limit, bound) if large is None else large
            receive.begin(number, token)
            try:
                receive.due()
            except BaseException as error:
                receive.internal_error(error)
            links.settle()
            return cast("bytes | int", await completed(receive, self.engine))
        self.slept = waited and waiting.slept
        polled = waiting.polled
        del self.waiting[wait], links.waiting[token]
        try:
            if verdict >= 0:
                return self.taken(number, verdict)
            if verdict != _ENDED:
                raise self.lost_message(verdict, limit, bound)
        finally:
            if links.news[0]:
                links.settle()
            if not waited:
                await waiting.schedule_point()
        if polled:  # a cancellation comes first
            await trio.lowlevel.checkpoint_if_cancelled()
        raise self._end_to_raise(number)

    def _end_to_raise(self, number: int) -> Exception:
        error = self.end_error(number)
        self.reported(error)
        return error

    def receive(self, number: int, want: Want, limit: int = ANY_LENGTH) -> PendingReceive:
        """Queues a receive that has no buffer of the user's, and takes a message of at most ``limit`` bytes."""
        return self.wait(number, PendingReceive(self, want, None, limit))

    def prepare(self, buffer: WritableBuffer) -> PendingReceive:
        """A receive into a user's buffer, which it pins. Then :meth:`take_ready` for it, or :meth:`wait`.

        Raises:
            TypeError, ValueError: not a buffer to receive into.
        """
        # Small messages are in memory of ours first, so it must be possible to copy them to the buffer.
        pins = pin(self.engine, buffer, writable=True, copies=True)
        return PendingReceive(self, Want.INTO, pins, pins.size, BUFFER)

    def submit(self, number: int, receive: PendingReceive) -> PendingReceive:
        """Receives the first message if it is in memory of ours; otherwise queues the receive. Errors are its own."""
        try:
            data = self.take_ready(number, receive.limit, receive.bound, looks=False)
            if data is not None:
                receive.accept(data)
        except Exception as error:
            receive.fail(error)
            return receive
        if data is None:
            return self.wait(number, receive)
        receive.finish(Value(len(data)))
        return receive

    def receive_suitable(self, number: int, target: ReceiveTarget) -> PendingReceive:
        """Queues a receive that takes the message only if the target wants it; else the message stays."""
        return self.wait(number, SuitableReceive(self, target))

    def wait(self, number: int, receive: PendingReceive) -> PendingReceive:
        """Queues a receive, which may complete at once. (The caller has checked that the connection is open.)"""
        self.number[0] = number
        token = lib.tu_link_wait(self.native.handle, self.number, 1)
        if token == ffi.NULL:
            receive.release()
            raise MemoryError("no memory to wait for a message")
        receive.begin(number, token)
        self._links.settle()
        if number >= wire.CONVERSATIONS and number not in self.conversations.channels and receive.outcome is None:
            receive.give_up(self.end_error(number))  # its channel was left while the receive looked for a message
        return receive

    def receive_nowait(self, number: int, limit: int) -> bytes:
        """Takes the first message of a tag queue if it is there, and has at most ``limit`` bytes.

        Raises:
            trio.WouldBlock: it is not.
            Others: the peer has gone; the message is too long.
        """
        data = self.take_ready(number, limit, looks=False)
        if data is None:
            self.engine.reap()
            data = self.take_ready(number, limit, looks=False)
        if data is not None:
            return data
        queue = self.native.queue(number)
        error = self._end_error(number) if queue is None or queue.messages == 0 else None
        if error is not None:
            self._raises(error)
            raise error
        raise trio.WouldBlock

    def next_piece(self, limit: int) -> bytes | None:
        """Takes what is there of the byte stream, at most ``limit`` bytes: b"" at the end, None if nothing is."""
        length = lib.tu_link_receive(self.native.handle, wire.STREAM, limit, False)
        if length < 0:
            return None
        data = self.taken(wire.STREAM, length)
        self._links.settle()
        return data

    # ---- any of several tag queues ----

    def has_spare(self, number: int) -> bool:
        """True if a message is there for which no receive waits."""
        queue = self.native.queue(number)
        return queue is not None and queue.messages > queue.waiting

    def next_number(self, numbers: Collection[int] | None) -> int | None:
        """Returns the next tag queue, in turn, with a message that no receive waits for; None if none has one."""
        if self.native.handle is None:
            return None
        if numbers is None:
            found = lib.tu_link_next_filled(self.native.handle, self._served)
            if found < 0:
                return None
            self._served = found
            return found
        ready = [number for number in numbers if self.has_spare(number)]
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
            error = self._end_error(number)
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
        self._refer()
        try:
            yield
        finally:
            self.any_waits.remove(numbers or ())
            self._refer()

    def _refer(self) -> None:
        """C code refers messages to Python while a task waits in several tag queues, or once nothing is received."""
        if self.native.handle is not None:
            lib.tu_link_refer(self.native.handle, bool(self.any_waits) or self.life.receive_reported)

    @contextmanager
    def watching(self, numbers: Collection[int], signal: Signal) -> Iterator[None]:
        """Sets the signal when a message may be there that no receive waits for, or :meth:`any_end` has changed."""
        self._admit(numbers)
        with self._awaiting(numbers), self.share.operations.watching(signal):
            yield

    def _admit(self, numbers: Iterable[int]) -> None:
        """A task waits in several tag queues: if they are empty for want of credit, admits their next messages."""
        if self.native.handle is not None and self.native.counts.stalled:
            for number in numbers:
                lib.tu_link_receive(self.native.handle, number, 0, True)
            self._links.settle()

    async def wait_conversation(self) -> int:
        """Waits until the peer begins a conversation, and returns its number.

        Raises:
            Exception: it will begin none.
        """
        conversations, waiting = self.conversations, self.engine.waiting
        try:
            error = conversations.begun_end()
            if error is not None:
                await waiting.schedule_point()
                raise error
            return cast(int, await conversations.waiters.wait(waiting.wait))
        except (trio.BrokenResourceError, trio.EndOfChannel) as error:
            self._raises(error)
            raise

    # ---- transfers ----

    def _fetch(self, item: Any, number: int, handle: int, length: int) -> None:
        """Receives a message that UCX has into memory of C code."""
        verdict = self.port.receive_at(handle, self._place[0], length)
        if verdict == Status.NO_MEMORY:
            lib.tu_link_leave_there(item)
        else:
            self.begin_transfer(item, number, length, None, verdict)

    def begin_transfer(self, item: Any, number: int, length: int, receive: PendingReceive | None, verdict: int) -> None:
        """UCX has begun to write a message to the buffer of a receive, or to memory of C code; or has done it."""
        if verdict > 0:
            self.engine.adopt(verdict, Transfer, self, verdict, item, number, length, receive)
            self.engine.submit()
        else:
            self.transfer_ended(item, number, length, receive, verdict)

    def transfer_ended(self, item: Any, number: int, length: int, receive: PendingReceive | None, status: int) -> None:
        """UCX has finished writing a message to memory, or will not."""
        if status == Status.NO_MEMORY:
            self.share.fail(UCXError(status, "receiving the next piece of a message"))  # the peer sends it once only
        if status == Status.INVALID_PARAM and length > lib.TU_LONG:
            self._refuse(wire.ProtocolError("it sent a piece of a long message that does not fit"))
        native = self.native.handle or ffi.NULL  # NULL: the message was dropped before
        if status == Status.OK:
            if lib.tu_link_moved(native, item):  # its receive has left
                assert receive is not None
                self.save(item, receive.copy)
        else:
            if not lib.tu_item_is_dropped(item):
                doing = "receiving a message"
                if status == Status.CANCELED:  # and we have not given it up
                    self.life.broken_off = True
                    doing = "the peer aborted the connection in the middle of a message"
                self.failures[number] = self.share.error_of(status, doing)
            lib.tu_link_failed(native, item)
        if receive is not None:
            receive.transfer_ended()
        self._links.settle()
        if not self.life.closed and self.life.peer is Peer.CLOSING:
            self._acknowledge()

    def save(self, item: Any, copy: Callable[[], bytes]) -> None:
        """Saves a message that lies in the buffer of a receive.

        Args:
            copy: copies it out of there.
        """
        data: Any = ffi.NULL
        try:
            data = copy()
        except (RuntimeError, MemoryError) as error:
            self._unsaved = error
        lib.tu_link_save(self.native.handle, item, data)

    def transferring(self) -> bool:
        """True if messages are being written to memory."""
        return any(not lib.tu_item_is_dropped(transfer.item) for transfer in self.transfers)

    def give_up_dropped(self) -> None:
        """Nobody will get some of the messages that are on their way: ends their receives, which may wait in vain."""
        dropped = [transfer for transfer in self.transfers if lib.tu_item_is_dropped(transfer.item)]
        for transfer in dropped:
            self.port.give_up(transfer.id)
            receive = transfer.receive
            if receive is not None and receive.outcome is None:
                receive.give_up(self.end_error(receive.number))
        if dropped:
            self.engine.submit()

    # ---- the end ----

    def _end_error(self, number: int | None) -> Exception | None:
        """Returns the exception for a receive on an empty tag queue; None while a message may still come."""
        if not self.life.open:
            return trio.ClosedResourceError("this connection was closed")
        failure = None if number is None else self.failures.get(number)
        if failure is not None:
            return self.share.problem() or failure  # a new one: each raise makes the traceback longer
        channel = None if number is None else self.conversations.channels.get(number)
        if number is not None and number >= wire.CONVERSATIONS and channel is None:
            return trio.ClosedResourceError("this channel was closed")  # while the receive looked for a message
        if channel is not None and channel.left:
            return trio.ClosedResourceError("this channel was closed")
        if channel is not None and channel.peer_left:
            return channel.end()
        if self.life.receives is Answer.END:
            origin = self.ending.origin if channel is None else channel.origin
            return about(origin, trio.EndOfChannel("the peer closed the connection"))
        if self.life.draining and self.share.error is None and (number is None or number < wire.CONVERSATIONS):
            return about(self.ending.origin, trio.EndOfChannel("this server shuts down (Server.drain)"))
        return self.share.problem()

    def end_error(self, number: int) -> Exception:
        """Returns the exception for a receive that has ended without a message."""
        error = self._end_error(number) or trio.ClosedResourceError("this connection was closed")
        self._failed(error)
        return error

    def drain(self) -> None:
        """From now on receives end where nothing has arrived."""
        self.life.draining = True
        self.native.answers(drains=True)
        self._ended()

    def _ended(self) -> None:
        """Receives have ended."""
        self.conversations.end_waits()
        self.share.operations.changed()

    def _channels_changed(self) -> None:
        self.give_up_dropped()
        self.receive_left()

    def receive_left(self) -> None:
        """Fewer receives wait somewhere: a message may be left for a task that waits in several tag queues."""
        if self.any_waits:
            self.share.operations.changed()

    def _raises(self, error: Exception) -> None:
        """A call raises this error."""
        self.reported(error)
        self._failed(error)

    def reported(self, error: BaseException) -> None:
        """The user gets this error from a receive."""
        if isinstance(error, trio.BrokenResourceError) and not is_about_a_part(error):
            self.ending.reported = self.life.receive_reported = True
            self._refer()

    def _failed(self, error: Exception) -> None:
        """Receives have ended with this error."""
        if isinstance(error, trio.BrokenResourceError) and not is_about_a_part(error):
            cause = error.__cause__
            if not self.life.peer_closes and isinstance(cause, UCXError):
                self.share.fail(cause)  # UCX has given up a message, and has not said that the endpoint failed

    def lacks(self, sent: int) -> bool:
        """True if not all data are here of the messages that the peer has sent, so many of them."""
        return self.native.counts.received < sent or self.transferring()

    def peer_ended(self, problem: Exception | None) -> None:
        """No message will arrive any more; ``problem``: the peer was lost."""
        if self.native.handle is None:
            return
        if problem is None:
            lib.tu_link_forget_with_sender(self.native.handle)
        else:
            lib.tu_link_lose(self.native.handle)
        self.native.answers(receives_end=True)
        self._ended()
        self.give_up_dropped()

    def end_waits(self, error: Exception) -> None:
        """Ends all receives, after an internal error. Never raises."""
        contained(self.conversations.connection_ended)
        for receive in list(self.waiting):
            contained(receive.give_up, error)
        contained(self.conversations.waiters.fail, error)

    def stop(self, error: Exception) -> None:
        """The connection is about to close: ends all receives."""
        self.conversations.connection_ended()
        for receive in list(self.waiting):
            receive.give_up(error)
        self.conversations.end_waits()
        self._links.settle()


class ReadBuffer:
    """What was received of a large piece of the byte stream, and not read."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest: bytes | memoryview = b""

    def take(self, max_bytes: int | None) -> bytes:
        """Takes at most ``max_bytes``."""
        rest = self.rest
        if max_bytes is None or max_bytes >= len(rest):
            data = bytes(rest)
            self.rest = b""
        else:
            data = bytes(rest[:max_bytes])
            self.rest = memoryview(rest)[max_bytes:]
        return data


class NextMessage:
    """A task that waits with a token until its message is there. Nothing is handed to it: it takes the message itself.

    It waits as a :class:`~trio_ucx.ucp._engine.waits.Pending` does. A cancelled one leaves its message to others.
    """

    __slots__ = (
        "_receiving",
        "_task",
        "error",
        "expected",
        "is_due",
        "notify",
        "number",
        "parked_at",
        "since",
        "token",
    )

    since: float

    def __init__(self, receiving: Receiving, number: int, token: Any) -> None:
        self._receiving = receiving
        self.number = number
        self.token = token
        #: Where C code says whether the token is due.
        self.is_due = lib.tu_token_is_due(token)
        #: Why there will be no message.
        self.error: Exception | None = None
        self._task: trio.lowlevel.Task | None = None
        self.expected = False
        self.notify = None
        self.parked_at: Any = None

    def due(self) -> None:
        """Wakes the task."""
        task, self._task = self._task, None
        if task is None:
            return
        at = self.parked_at
        if at.leader is self:
            at.wake_leader()
        else:
            self.parked_at = None
            at.woken(task)
            trio.lowlevel.reschedule(task)

    def leave(self) -> None:
        """It waits no more."""
        token, self.token = self.token, None
        self.is_due = _OVER
        if token is not None:
            self._receiving.waiting.pop(self, None)
            self._receiving.engine.links.waiting.pop(token, None)
            lib.tu_link_leave(token)

    def give_up(self, error: Exception) -> None:
        """Ends it with an error."""
        self.error = error
        self.leave()
        self.due()

    def internal_error(self, error: BaseException) -> None:
        self._receiving.internal_error(error)

    # ---- as a Pending ----

    async def wait(self, *, watch: bool = False) -> None:
        """Parks."""

        def leave(_: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        self.since = perf_counter()
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(leave)

    async def cancel_for_leader(self, error: BaseException) -> bool:
        """Returns False: the task gets the cancellation. Its message stays."""
        return False

    def result(self) -> None:
        """Nothing is handed over."""


class PendingReceive(Pending):
    """A receive that waits for its message. Owns the user's buffer, if it has one, and releases it at its end.

    If it is cancelled while UCX writes to the buffer, it keeps the buffer until UCX is done.

    Args:
        bound: what the limit is, in words; by default, the user's or the connection's ``max_size``.
    """

    __slots__ = (
        "_buffer",
        "_fresh",
        "_item",
        "_length",
        "_moving",
        "_receiving",
        "_token",
        "begun",
        "bound",
        "limit",
        "number",
        "pins",
        "want",
    )

    number: int

    def __init__(self, receiving: Receiving, want: Want, pins: Pinned | None, limit: int, bound: str = "") -> None:
        super().__init__()
        self.bound = bound
        #: Whether it has waited for its message, or does.
        self.begun = False
        self._receiving = receiving
        self.want = want
        self.pins = pins
        self.limit = limit
        #: What it waits with.
        self._token: Any = None
        #: The message that is in its buffer, or on its way there, and its length.
        self._item: Any = None
        self._length = 0
        self._moving = False
        #: That buffer: the user's, or fresh memory.
        self._buffer: Pinned | None = None
        self._fresh: bytes | None = None

    def begin(self, number: int, token: Any) -> None:
        """It waits with this token."""
        self.begun = True
        self.number = number
        self._token = token
        self._receiving.waiting[self] = None
        self._receiving.engine.links.waiting[token] = self

    def accept(self, contents: bytes) -> None:
        """Takes a message that was in memory of ours.

        Raises:
            RuntimeError: the device of the buffer failed.
        """
        try:
            if self.pins is not None:
                self.pins.fill(memoryview(contents))
        finally:
            self.release()

    # ---- its message ----

    def due(self) -> None:
        """It may go on."""
        receiving = self._receiving
        looks = self.want is Want.LENGTH or self.want is Want.SUITABLE
        while self._token is not None:
            if self._item is not None and not self._moving and not lib.tu_token_holds(self._token):
                self._item = None  # the message was dropped
            verdict = lib.tu_link_take(self._token, self.limit, looks, receiving.number)
            if verdict == _EMPTY or (verdict == _BEGIN and not self._transfer()):
                return
            if verdict == _BEGIN:
                continue
            if verdict == _SAVE:
                self._save(self._item)
            elif verdict >= 0 and looks:
                self._look(verdict)
            else:
                token, self._token = self._token, None
                self._over(token)
                self._conclude(verdict)

    def _transfer(self) -> bool:
        """Begins the transfer of its message. Returns False if that goes on."""
        receiving = self._receiving
        links = receiving.engine.links.native
        number, length = receiving.number[0], lib.tu_links_length(links)
        if self.want is Want.LENGTH:
            self._leave()
            self._succeed(length)
            return True
        try:
            if length > self.limit and number != wire.STREAM:
                raise receiving.too_long(length, self.limit, self.bound)
            self._choose_buffer(length)
            assert self._buffer is not None
            verdict = receiving.port.receive(lib.tu_links_handle(links), self._buffer)
            if verdict == Status.NO_MEMORY:  # nothing has happened
                raise MemoryError
        except MessageTooLong as error:
            self._drop(number)
            self.fail(error)
            return True
        except MemoryError:
            stays = number == wire.STREAM
            if stays:
                self._leave()
            else:
                self._drop(number)
            fate = "it can be read again" if stays else "it was dropped"
            self.fail(MemoryError(f"there is no memory for a message of {length} bytes: {fate}"))
            return True
        self._item, self._length, self._moving = lib.tu_link_begin(self._token, number), length, True
        try:
            receiving.begin_transfer(self._item, number, length, self, verdict)
        except RuntimeError as error:  # UCX writes to the buffer, which is kept until it has done that
            self.give_up(error)
        return not self._moving

    def _drop(self, number: int) -> None:
        """Drops its message, which does not suit it."""
        token, self._token = self._token, None
        lib.tu_link_drop(token, number)
        self._over(token)

    def _choose_buffer(self, length: int) -> None:
        # A peer that dies may have written only part of a message that UCX has. A receive that waited for the rest
        # would keep the user's buffer, so such a message is received into memory of ours, and copied.
        if self.fits(length) and not self._receiving.is_whole(length):
            self._buffer = self.pins
        else:
            self._fresh = new_bytes(length)
            self._buffer = Pinned(self._fresh)

    def transfer_ended(self) -> None:
        """UCX has finished writing to its buffer."""
        self._moving = False
        if self._token is None:  # it was cancelled meanwhile
            self._receiving.detached_receives.discard(self)
            self.release()
            self._receiving.share.operations.changed()

    def _save(self, item: Any) -> None:
        """The message in its buffer is another receive's."""
        self._receiving.save(item, self.copy)
        self._item = None

    def copy(self) -> bytes:
        """Copies the message out of its buffer.

        Raises:
            RuntimeError: the device of the buffer failed.
            MemoryError: there is no memory for the copy.
        """
        assert self._buffer is not None
        return self._fresh if self._fresh is not None else self._buffer.copy(self._length)

    def fits(self, length: int) -> bool:
        """True if a message of this length may be written to the user's buffer at once."""
        return self.want is Want.INTO

    def look(self, contents: bytes | None) -> Exception | None:
        """Looks at a message (None: it is in the user's buffer). Returns the error to end with if it is not wanted."""
        return None

    def _look(self, length: int) -> None:
        """The message is there, and stays unless it is wanted."""
        receiving = self._receiving
        if self.want is Want.LENGTH:
            self._leave()
            self._succeed(length)
            return
        in_place = self._item is not None and self._fresh is None
        error: Exception | None = None
        if length <= self.limit:  # else it will be dropped
            try:
                error = self.look(None if in_place else self._contents(length))
            except Exception as failure:  # of the buffer's, which may have changed meanwhile
                error = failure
        if error is not None and in_place:
            self._save(self._item)  # and look at all of it
            return
        if error is not None:
            self._leave()
            self.fail(error)
            return
        token, self._token = self._token, None
        verdict = lib.tu_link_take(token, self.limit, False, receiving.number)
        self._over(token)
        if verdict < 0:
            self.fail(receiving.lost_message(verdict, self.limit, self.bound))
        else:
            self._succeed(length)

    def _contents(self, length: int) -> bytes:
        """The bytes of its message, if they are not in the user's buffer."""
        return self._receiving.looked_at(length) if self._item is None else cast(bytes, self._fresh)

    def _conclude(self, verdict: int) -> None:
        """Its token is over: it has got its message, or will get none."""
        receiving = self._receiving
        try:
            if verdict == _ENDED:
                raise receiving.end_error(self.number)
            if verdict < 0:
                raise receiving.lost_message(verdict, self.limit, self.bound)
            if self.want is not Want.INTO:
                self._succeed(self._contents(verdict))
                return
            if self._item is None or self._fresh is not None:
                assert self.pins is not None
                self.pins.fill(memoryview(self._contents(verdict)))
            self._succeed(verdict)
        except Exception as error:
            self.fail(error)

    # ---- its end ----

    def _over(self, token: Any) -> None:
        """C code has forgotten, or will, what was its token."""
        self._receiving.waiting.pop(self, None)
        self._receiving.engine.links.waiting.pop(token, None)

    def _leave(self) -> None:
        """It waits no more. Its message, if there is one, is the next receive's."""
        token = self._token
        if token is None:
            return
        item = lib.tu_token_holds(token)
        if item:
            self._save(item)
        self._token = None
        self._over(token)
        lib.tu_link_leave(token)
        if not self._moving:
            self.release()
        elif self._fresh is None:
            self._receiving.detached_receives.add(self)
        elif self.pins is not None:
            self.pins.release()

    def _succeed(self, value: Any) -> None:
        try:
            self.release()
        finally:
            self.finish(Value(value))

    def fail(self, error: Exception) -> None:
        """Ends it with an error, and releases its buffers."""
        if isinstance(error, MemoryError):
            about(self._receiving.ending.origin, error)  # the peer's message is too long for this process
        try:
            if not self._moving:
                self.release()
        finally:
            self.finish(Error(error))

    def release(self) -> None:
        """Releases the buffers."""
        if self.pins is not None:
            self.pins.release()
        if self._buffer is not None and self._buffer is not self.pins:
            self._buffer.release()

    def give_up(self, error: Exception) -> None:
        """Ends it with an error."""
        self._leave()
        self.finish(Error(error))

    def reported(self, error: BaseException) -> None:
        self._receiving.reported(error)

    def cancel(self) -> bool:
        self._leave()
        self._receiving.engine.links.settle()
        self._receiving.receive_left()
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
        """See :meth:`PendingReceive.look`. Copies the message to ``pins``, if it has some."""


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
        most = receiving.max_message_size
        super().__init__(receiving, Want.SUITABLE, target.pins, max(size, most), BUFFER if size > most else "")
        self._target = target

    def fits(self, length: int) -> bool:
        return self._target.fits(length)

    def look(self, contents: bytes | None) -> Exception | None:
        error = self._target.look(contents)
        return None if error is None else about(self._receiving.ending.origin, error)

    def _succeed(self, value: Any) -> None:
        super()._succeed(self._target.value)


class Transfer(Operation):
    """A message on its way into memory: of a receive, which keeps it until the end, or of C code."""

    __slots__ = ("_length", "_number", "_receiving", "item", "receive")

    def __init__(
        self, receiving: Receiving, id: int, item: Any, number: int, length: int, receive: PendingReceive | None
    ) -> None:
        super().__init__(receiving.engine, id, None, f"receiving {length} bytes from {receiving.share.label}")
        self.item = item
        self._receiving = receiving
        self._number = number
        self._length = length
        self.receive = receive
        receiving.transfers[self] = None

    def _ended(self, status: int) -> None:
        del self._receiving.transfers[self]
        self._receiving.transfer_ended(self.item, self._number, self._length, self.receive, status)

    def complete(self, status: int, length: int, tag: int) -> None:
        self.release()
        self.finish(Value(None))
        self._ended(status)

    def worker_destroyed(self) -> None:
        super().worker_destroyed()
        self._ended(Status.CANCELED)

    def internal_error(self, error: BaseException) -> None:
        self._receiving.internal_error(error)
