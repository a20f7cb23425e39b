"""The Connection: messages and a byte stream between two trio_ucx peers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ._channels import Channel
from ._link import Link
from ._opening.options import check_max_size
from ._peer_info import PeerInfo, PeerState
from ._rules import byte_stream as stream
from ._rules import wire
from ._statistics import ConnectionStatistics
from ._util.arguments import check_integer, check_timeout
from ._util.handles import ConflictDetector, OpenedNotConstructed, warn_resource
from .ucp import Endpoint, MemoryDescriptor, RemoteMemory, Worker
from .ucp._internal_api import (
    Buffer,
    Pending,
    WritableBuffer,
    check_elements,
    check_whole,
    close_in_background,
    completed,
)


def check_tag(tag: int) -> int:
    return check_integer(tag, "the tag", 0, wire.MAX_TAG)


@attrs.define(eq=False, repr=False)
class Connection(trio.abc.HalfCloseableStream, metaclass=OpenedNotConstructed):
    """A connection between two trio_ucx peers. Open one with :func:`connect`, or accept it from a :class:`Listener`.

    It carries messages, each with a tag; each tag is an ordered queue of its own. Besides, it carries one byte stream,
    which does not interfere with them; ``async for chunk in connection`` yields its chunks.

    As an async context manager it closes gracefully when its block is left normally, and by force when by an exception.

    Cancellation: a cancelled block closes by force. A cancelled ``async for`` loses nothing.
    """

    _link: Link
    _endpoint: Endpoint | None = None
    _eof_sent: bool = False
    _sending: ConflictDetector = attrs.field(
        factory=lambda: ConflictDetector("another task is sending on this connection's byte stream")
    )
    _receiving: ConflictDetector = attrs.field(
        factory=lambda: ConflictDetector("another task is receiving on this connection's byte stream")
    )

    @classmethod
    def _wrap(cls, link: Link) -> Connection:
        connection = cls._create(link)
        reference = weakref.ref(connection)
        link.share.facade = lambda: found.endpoint if (found := reference()) is not None else None
        name = repr(connection)
        link.on_unclosed = lambda: warn_resource(f"unclosed {name}")
        return connection

    # ---- properties ----

    @property
    def endpoint(self) -> Endpoint:
        """Its UCP endpoint, which all Connections between the same two workers share.

        What is posted on it ends with this connection. It cannot be closed: close the connection.
        """
        if self._endpoint is None:
            self._endpoint = Endpoint._create(self._link.worker, self._link.share)
        return self._endpoint

    @enable_ki_protection
    async def attach(self, descriptor: bytes | MemoryDescriptor) -> RemoteMemory:
        """Attaches memory of the peer's, and waits until its access path is known (:class:`trio_ucx.ucp.RemoteMemory`).

        The RemoteMemory ends with the connection; close it earlier with ``with``.

        Args:
            descriptor: the :attr:`trio_ucx.ucp.Memory.descriptor` of the memory, which the peer has sent somehow.

        Cancellation: nothing is attached.

        Raises:
            TypeError, ValueError: it is no descriptor, or damaged; it is of another process's memory than the peer's,
                or says more memory than there is.
            RuntimeError: the worker was opened without ``Feature.AM``, ``RMA``, ``AMO32`` and ``AMO64``.
            trio.ClosedResourceError, trio.BrokenResourceError: the connection was closed; the peer is gone.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        memory = self.endpoint.attach(descriptor)
        try:
            await memory.connect()
        except BaseException:
            memory.close()
            raise
        return memory

    @property
    def worker(self) -> Worker:
        """The worker that it lives on."""
        return self._link.worker

    @property
    def closed(self) -> bool:
        """True if this side has closed or aborted it, also while a cancelled :meth:`aclose` ends in the background.

        See :attr:`peer_state` for the peer.
        """
        return not self._link.life.open

    @property
    def peer_state(self) -> PeerState:
        """Returns how far the peer has closed, as far as this side knows."""
        return self._link.life.peer_state

    @property
    def draining(self) -> bool:
        """True if the server that has accepted it shuts down (:meth:`Server.drain`).

        Receives then get what has arrived, and after that the end; sends go on.
        """
        return self._link.life.draining

    @property
    def peer(self) -> PeerInfo:
        """Returns who the peer is."""
        info = self._link.peer_info
        assert info is not None
        return info

    @property
    def transports(self) -> tuple[str, ...]:
        """UCX's transports that it uses, such as ``("sysv/memory", "cma/memory")`` (``ucp_ep_query``; UCX 1.14).

        Raises:
            UCXError: trio_ucx was built against UCX 1.13.
        """
        return tuple(f"{each.name}/{each.device}" for each in self.endpoint.transports)

    @property
    def shared_memory(self) -> bool:
        """True if the connection uses shared memory."""
        return self._link.why_not_shared_memory is None

    @property
    def why_not_shared_memory(self) -> str | None:
        """Returns why the connection does not use shared memory, in words; None if it does."""
        return self._link.why_not_shared_memory

    @property
    def local_address(self) -> tuple[str, int] | None:
        """Our ``(host, port)`` of the control socket; at a Unix socket ``("unix:/path", 0)``, None without a name."""
        return self._link.local_address

    @property
    def remote_address(self) -> tuple[str, int] | None:
        """The peer's ``(host, port)`` of the control socket, as :attr:`local_address`."""
        return self._link.remote_address

    def statistics(self) -> ConnectionStatistics:
        """Returns what it has sent and received, what it holds, and what it may send.

        Raises: nothing, also after the close.
        """
        link = self._link
        detached = sum(operation.detached for operation in link.share.operations.pending)
        counts = link.native.counts
        return ConnectionStatistics(
            messages_sent=counts.sent,
            bytes_sent=counts.bytes_sent,
            messages_received=counts.received,
            bytes_received=counts.bytes_received,
            held=counts.unread,
            credit=counts.credit,
            queued_sends=len(link.sending.waiting),
            left_over_operations=detached + len(link.receiving.detached_receives),
        )

    # ---- messages ----

    @enable_ki_protection
    async def send(self, data: Buffer, *, tag: int = 0) -> None:
        """Sends one message (``ucp_tag_send_nbx``).

        Returns when ``data`` may be used again, which is not yet delivery. Waits while the peer holds a whole
        ``window`` of unread messages, and, with a large message, until the peer receives it.

        Args:
            data: a contiguous buffer, or a list of them, which arrives as one message; or a ``ucp.Strided``. Large ones
                are not copied. Device memory goes to UCX as it is.
            tag: the tag queue, 0 to 2**31 - 1.

        Cancellation: returns at once. The message may or may not be delivered, whole or not at all. ``data`` may stay
        pinned, and must not be changed, until :meth:`wait_buffers_released` returns.

        Raises:
            trio.ClosedResourceError: this connection was closed.
            trio.BrokenResourceError: the peer closed it, or is gone.
            TypeError, ValueError, RuntimeError: not such a buffer; the tag is out of range; the buffer's device failed.
            MemoryError: there is no memory for the message; it was not sent.
        """
        if type(tag) is not int or not 0 <= tag <= wire.MAX_TAG:
            tag = check_tag(tag)
        link = self._link
        await trio.lowlevel.checkpoint_if_cancelled()
        link.check()
        # As Link.send, without the call: every message passes here.
        sent = link.sending.send_short(tag, data)
        if sent is True:
            await link.engine.waiting.schedule_point()
        else:
            await completed(sent or link.sending.send(tag, data), link.engine)

    @enable_ki_protection
    def send_nowait(self, data: Buffer, *, tag: int = 0) -> None:
        """Sends one message without waiting; ``data`` and ``tag`` as for :meth:`send`.

        ``bytes`` are kept by reference until UCX has taken them; mutable data are copied. An error that shows only
        later breaks the connection, or is raised by :meth:`aclose`.

        Raises:
            trio.WouldBlock: the peer's window is full, or other sends wait for it.
            ValueError: more than 1 MiB of mutable data: use :meth:`send`, which does not copy.
            trio.ClosedResourceError, trio.BrokenResourceError, TypeError, RuntimeError: as for :meth:`send`.
        """
        if type(tag) is not int or not 0 <= tag <= wire.MAX_TAG:
            tag = check_tag(tag)
        self._link.check()
        self._link.send_nowait(tag, data)

    @enable_ki_protection
    async def receive(self, *, tag: int = 0, max_size: int | None = None) -> bytes:
        """Receives the next message of a tag queue.

        Args:
            tag: the tag queue.
            max_size: the longest message to take, in bytes; by default the connection's ``max_message_size``.

        Cancellation: nothing is lost. A message whose transfer had begun goes to the queue's next receive.

        Raises:
            trio.EndOfChannel: the peer has closed, or this server drains, and all that had arrived was received.
            trio.BrokenResourceError: the peer is gone, and all that had arrived was received.
            trio.ClosedResourceError: this connection was closed, perhaps meanwhile.
            MessageTooLong: the message is longer than ``max_size``; it was dropped.
            MemoryError: there is no memory for the message; it was dropped.
            TypeError, ValueError: a wrong tag or ``max_size``.
        """
        if type(tag) is not int or not 0 <= tag <= wire.MAX_TAG:
            tag = check_tag(tag)
        link = self._link
        receiving = link.receiving
        limit = receiving.max_message_size if max_size is None else check_max_size(max_size)
        await trio.lowlevel.checkpoint_if_cancelled()
        link.check()
        # As Link.receive, without the call.
        data = receiving.take_ready(tag, limit)
        if data is not None:
            await link.engine.waiting.schedule_point()
            return data
        return await receiving.next(tag, limit)

    @enable_ki_protection
    async def receive_into(self, buffer: WritableBuffer, *, tag: int = 0, exact: bool = False) -> int:
        """Receives the next message of a tag queue into a buffer; a large message directly, without a copy.

        Args:
            buffer: writable and contiguous, or a list of such buffers, filled in order; or a ``ucp.Strided``. In device
                memory, too.
            tag: the tag queue.
            exact: a message that does not fill the buffer exactly is an error, and stays for the next receive.

        Returns:
            The message's length; the rest of the buffer is not changed.

        Cancellation: nothing is lost. If a transfer into ``buffer`` had begun, it goes on, and ``buffer`` must not be
        used until :meth:`wait_buffers_released` returns; the message goes to the queue's next receive.

        Raises:
            MessageTooLong: the message is longer than the buffer; it was dropped.
            UnexpectedMessage: with ``exact``, it has another length; it was not taken.
            RuntimeError: the device of the buffer failed; the message is lost.
            TypeError, ValueError: not such a buffer; a wrong tag.
            trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError: as for :meth:`receive`.
        """
        tag = check_tag(tag)
        link = self._link
        await trio.lowlevel.checkpoint_if_cancelled()
        link.check()
        return await link.receive_into(tag, buffer, exact=exact)

    @enable_ki_protection
    def receive_nowait(self, *, tag: int = 0, max_size: int | None = None) -> bytes:
        """Receives the next message of a tag queue if it has arrived; ``tag`` and ``max_size`` as for :meth:`receive`.

        Raises:
            trio.WouldBlock: it has not; or it is a large one, which only a waiting receive transfers.
            trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError: as for :meth:`receive`.
            MessageTooLong, MemoryError, TypeError, ValueError: as for :meth:`receive`.
        """
        tag = check_tag(tag)
        receiving = self._link.receiving
        limit = receiving.max_message_size if max_size is None else check_max_size(max_size)
        self._link.check()
        return receiving.receive_nowait(tag, limit)

    @enable_ki_protection
    async def wait_message(self, *, tag: int = 0) -> int:
        """Waits until a tag queue has a message, which stays; returns its length.

        Cancellation: it has no effect.

        Raises:
            trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError: as for :meth:`receive`.
            TypeError, ValueError: a wrong tag.
        """
        tag = check_tag(tag)
        await trio.lowlevel.checkpoint_if_cancelled()
        self._link.check()
        return await self._link.wait_message(tag)

    @enable_ki_protection
    async def receive_newest(self, *, tag: int = 0, max_size: int | None = None) -> bytes:
        """Receives the newest message of a tag queue, and drops older ones: for values of which only the last matters.

        From the first call on, the tag queue keeps one message for which no receive waits: each one that arrives takes
        the place of the one before. The sender should use :meth:`send_nowait`: with :meth:`send`, a large message waits
        until it is received, or a newer one comes.

        Args:
            tag: the tag queue.
            max_size: as for :meth:`receive`.

        Cancellation: as :meth:`receive`; a message whose transfer had begun may be replaced by a newer one.

        Raises: as :meth:`receive`.
        """
        tag = check_tag(tag)
        limit = self._link.receiving.max_message_size if max_size is None else check_max_size(max_size)
        await trio.lowlevel.checkpoint_if_cancelled()
        self._link.check()
        return await self._link.receive_newest(tag, limit)

    @enable_ki_protection
    async def send_array(self, array: Any, *, tag: int = 0) -> None:
        """Sends an array as one message, with its dtype, shape and order; :meth:`receive_array` gets it.

        A large array is not copied if it is contiguous, in C or Fortran order, and in host memory.

        Args:
            array: a numpy array or scalar of any dtype without Python objects, or what has the buffer protocol, DLPack
                or the CUDA array interface.
            tag: the tag queue.

        Cancellation: as :meth:`send`.

        Raises:
            TypeError, ValueError: not such an array; one with a mask; the tag is out of range.
            trio.ClosedResourceError, trio.BrokenResourceError, RuntimeError, MemoryError: as :meth:`send`.
        """
        from ._arrays.messages import message_of

        await self.send(message_of(array), tag=tag)

    @enable_ki_protection
    async def receive_array(
        self, *, tag: int = 0, out: Any = None, allocate: Callable[[int], Any] | None = None
    ) -> Any:
        """Receives the next message of a tag queue, which has one array.

        Args:
            tag: the tag queue.
            out: a writable array of the same dtype and shape, of any of the kinds that :meth:`send_array` takes. A
                large message goes straight into it if it is contiguous, in the same order.
            allocate: a function that returns writable host memory for a number of bytes, of which the array will be a
                view: memory of a pool, say. It also holds the header, in front of the array. Without ``out`` only. (If
                several tasks receive on this tag, another one may get the message; the array may then be elsewhere.)

        Returns:
            ``out``, or a new numpy array.

        Cancellation: nothing is lost. If a transfer into memory of yours had begun, it goes on, and the memory must not
        be used until :meth:`wait_buffers_released` returns; the message goes to the queue's next receive.

        Raises:
            UnexpectedMessage: the message is no array, several ones, or one of another dtype or shape than ``out``. It
                was not taken; a large one may have been written to ``out``.
            MessageTooLong, MemoryError: the message is longer than the connection's ``max_message_size``, and not as
                long as ``out`` needs; there is no memory for it. It was dropped.
            TypeError, ValueError: wrong arguments; what ``allocate`` returned cannot be used.
            ImportError: numpy is not installed, and ``out`` not given.
            RuntimeError: the device of ``out`` failed; the message is lost.
            trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError: as for :meth:`receive`.
        """
        from ._arrays.messages import receive

        return await receive(self._link, check_tag(tag), self._link.check, True, out, allocate)

    @enable_ki_protection
    async def send_arrays(self, arrays: Mapping[str, Any] | Sequence[Any], *, tag: int = 0) -> None:
        """Sends a list of arrays, or a dict of them by name, as one message: as :meth:`send_array`.

        Cancellation: as :meth:`send`.

        Raises: as :meth:`send_array`.
        """
        from ._arrays.messages import message_of_many

        await self.send(message_of_many(arrays), tag=tag)

    @enable_ki_protection
    async def receive_arrays(
        self,
        *,
        tag: int = 0,
        into: Mapping[str, Any] | Sequence[Any] | None = None,
        allocate: Callable[[int], Any] | None = None,
    ) -> Any:
        """Receives the next message of a tag queue, which has a list or a dict of arrays: as :meth:`receive_array`.

        Args:
            tag: the tag queue.
            into: writable arrays of the same dtypes and shapes, as many, in a list or in a dict with the same names. A
                large message goes straight into them if all are contiguous, and it has them in the same order.
            allocate: as for :meth:`receive_array`. All arrays are views of the same memory.

        Returns:
            ``into``, or a list or a dict of new numpy arrays, as it was sent.

        Cancellation: as :meth:`receive_array`.

        Raises: as :meth:`receive_array`.
        """
        from ._arrays.messages import receive

        return await receive(self._link, check_tag(tag), self._link.check, False, into, allocate)

    def messages(self, tag: int = 0) -> Messages:
        """Returns the messages of a tag queue as an asynchronous iterator, which ends when the peer closes.

        Cancellation: a cancelled step loses no message, and the iterator can be used again.

        Raises:
            TypeError, ValueError: a wrong tag. (Each step raises what :meth:`receive` does, except at the end.)
        """
        return Messages._create(self, check_tag(tag))

    @enable_ki_protection
    async def receive_any(self, tags: Iterable[int] | None = None, *, max_size: int | None = None) -> tuple[int, bytes]:
        """Receives the next message of any of several tag queues, and returns its tag and its content.

        Tag queues that have messages take turns. Receives that wait at one of them come first there.

        Args:
            tags: the tag queues; None: all. When the byte stream or conversations have filled the window, a call with
                None lets no message past them, because it does not know which one waits.
            max_size: as for :meth:`receive`.

        Cancellation: nothing is lost.

        Raises:
            trio.EndOfChannel: as for :meth:`receive`, when it is the end of all of them.
            trio.BrokenResourceError, trio.ClosedResourceError, MessageTooLong, MemoryError: as for :meth:`receive`.
            TypeError, ValueError: a wrong tag, or none; a wrong ``max_size``.
        """
        numbers = None if tags is None else [check_tag(tag) for tag in tags]
        if numbers is not None and not numbers:
            raise ValueError("tags must have at least one tag; None means all")
        link, receiving = self._link, self._link.receiving
        limit = receiving.max_message_size if max_size is None else check_max_size(max_size)
        await trio.lowlevel.checkpoint_if_cancelled()
        link.check()
        number = receiving.next_number(numbers)
        if number is None:
            number = await receiving.wait_any(numbers)
            link.check()
        data = receiving.take_ready(number, limit)
        if data is None:
            data = await receiving.next(number, limit)
        else:
            await link.engine.waiting.schedule_point()
        return number, data

    # ---- channels ----

    def channel(self, tag: int) -> Channel:
        """Returns a channel over a tag, for code that was written for Trio's channels.

        Both sides call it, and use nothing else for this tag. When both have closed their ends, the tag can be used
        anew. The side that closes its end second can do so at once; the other one does not learn when that is. For one
        exchange after the other, use :meth:`open_conversation`.

        Cancellation: of its operations, see :class:`Channel`.

        Raises:
            RuntimeError: this side has closed the last channel with this tag, or 16,384 channels over tags, and the
                peer has not closed its end yet.
            trio.ClosedResourceError: this connection was closed.
            trio.BrokenResourceError: this side has closed the last channel with this tag, and the peer is gone.
            TypeError, ValueError: a wrong tag.
        """
        self._link.check()
        return Channel._create(self, self._link.receiving.conversations.over_tag(check_tag(tag)))

    def open_conversation(self) -> Channel:
        """Opens a channel with tag queues of its own, for a request and its replies. Leave its block when it is over.

        The peer gets its end from :meth:`conversations`, with the first message. A reply that comes after this side has
        left, because it did not wait any longer, is dropped: no other conversation gets it.

        Cancellation: of its operations, see :class:`Channel`.

        Raises:
            trio.ClosedResourceError: this connection was closed.
            RuntimeError: 2**28 conversations that were opened here have not ended.
        """
        self._link.check()
        return Channel._create(self, self._link.receiving.conversations.open())

    @enable_ki_protection
    async def request(self, data: Buffer, *, timeout: float = math.inf, max_size: int | None = None) -> bytes:
        """Sends a request in a conversation of its own, and returns the reply, of one message.

        The peer answers with :func:`answering`, or by hand (:meth:`conversations`). Many tasks can ask at once.

        Args:
            data: the request; as for :meth:`send`.
            timeout: seconds to wait for the reply.
            max_size: the longest reply, in bytes; as for :meth:`receive`.

        Cancellation: the peer's :func:`answering` cancels its work on the request. A reply that comes late is dropped.

        Raises:
            trio.TooSlowError: there was no reply within ``timeout``; as with a cancellation, the peer is told.
            trio.EndOfChannel: the peer left the conversation without a reply, or closed the connection; or it drains
                (:meth:`Server.drain`).
            PeerLost: the peer broke off the conversation, because of an error there, say; or it is gone.
            trio.ClosedResourceError: this connection was closed.
            trio.BrokenResourceError, MessageTooLong, MemoryError, RuntimeError: as :meth:`send` and :meth:`receive`.
            TypeError, ValueError: wrong arguments.
        """
        timeout = check_timeout(timeout, "timeout")
        if max_size is not None:
            check_max_size(max_size)
        if timeout == math.inf:
            return await self._request(data, max_size)
        with trio.fail_after(timeout):
            return await self._request(data, max_size)

    async def _request(self, data: Buffer, max_size: int | None) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        talk = self.open_conversation()
        try:
            await talk.send(data)
            reply = await talk.receive(max_size=max_size)
        except BaseException:
            talk._close(by_force=True)
            raise
        talk._close()
        return reply

    def conversations(self) -> Conversations:
        """Returns the conversations that the peer opens as an asynchronous iterator, which ends when the peer closes.

        It also ends when the server drains (:meth:`Server.drain`); conversations that are open then go on, and new ones
        are left at once.

        Cancellation: a cancelled step loses no conversation, and the iterator can be used again.

        Raises: nothing.
        """
        return Conversations._create(self)

    @enable_ki_protection
    async def wait_buffers_released(self) -> None:
        """Waits until no buffer of a cancelled send, receive, get or put belongs to the library any more.

        It returns when the peer has received each large message whose send was cancelled, or has dropped it because the
        connection has ended; at most half a second after the last connection between the same two workers has ended, by
        :meth:`aclose`, :meth:`abort` or the loss of the peer. (Until then it waits for a peer that is suspended.) If a
        local peer was killed while large messages moved over shared memory, it may return only when the worker closes:
        for sends of up to 1 MiB, and for receives.

        Cancellation: it has no effect.

        Raises:
            trio.BrokenResourceError: the worker broke. The buffers are released when it has been closed.
        """
        await trio.lowlevel.checkpoint()
        link = self._link
        await link.share.operations.wait_until(lambda: link.engine.broken is not None or link.buffers_released())
        if not link.buffers_released():
            link.engine.check()

    # For request groups.

    def _submit_send(self, data: Buffer, tag: int) -> Pending | None:
        tag = check_tag(tag)
        self._link.check()
        sending = self._link.sending
        sent = sending.send_short(tag, data)
        return None if sent is True else sent or sending.send(tag, data)

    def _submit_receive_into(self, buffer: WritableBuffer, tag: int) -> Pending:
        tag = check_tag(tag)
        self._link.check()
        receiving = self._link.receiving
        return receiving.submit(tag, receiving.prepare(buffer))

    # ---- the byte stream ----

    def _check_stream(self) -> None:
        self._link.check()
        if self._eof_sent:
            raise trio.ClosedResourceError("send_eof was called on this connection's byte stream")

    @enable_ki_protection
    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Sends bytes on the byte stream; see ``trio.abc.SendStream``.

        Returns when ``data`` may be used again. Less than 256 KiB wait only while the peer's window is full. From 256
        KiB on they are not copied, and stay here until the peer reads them: so do not write as much from both sides
        before either reads.

        Cancellation: a part of unknown length has been sent, and the stream can still be used. ``data`` may stay
        pinned, and must not be changed, until :meth:`wait_buffers_released` returns.

        Raises:
            trio.BusyResourceError: another task is sending on it.
            trio.ClosedResourceError: this connection was closed, or :meth:`send_eof` called.
            trio.BrokenResourceError: the peer closed it, or is gone.
            TypeError: not a contiguous bytes-like object.
        """
        with self._sending:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check_stream()
            link = self._link
            sending = link.sending
            if type(data) not in (bytes, bytearray):
                check_whole(data)
            # An empty message would be the end of the stream.
            short = type(data) in (bytes, bytearray, memoryview) and 0 < len(data) <= stream.small_piece(sending.window)
            if short and sending.send_short(wire.STREAM, data):
                await link.engine.waiting.schedule_point()
                return
            sending.check()
            waited = False
            check_elements(data, "send")
            with memoryview(data) as view, view.cast("B") as flat:
                written = sending.write_short(flat)

                def submit(piece: slice) -> Pending | None:
                    link.check()  # another task may have closed since the last piece
                    return sending.send(wire.STREAM, flat[piece])

                cut = stream.pieces(len(flat), sending.window, sending.threshold, written)
                write = stream.Write(submit, cut)
                try:
                    while (pending := write.advance()) is not None:
                        await link.engine.waiting.wait(pending, watch=True)
                        waited = True
                finally:
                    write.cancel()
            if not waited:
                await link.engine.waiting.schedule_point()

    @enable_ki_protection
    async def wait_send_all_might_not_block(self) -> None:
        """Waits until the peer's window has room; see ``trio.abc.SendStream``.

        Cancellation: it has no effect.

        Raises: as :meth:`send_all`.
        """
        with self._sending:
            await trio.lowlevel.checkpoint()
            self._check_stream()
            await self._link.sending.wait_room(wire.STREAM)
            self._check_stream()
            self._link.sending.check()

    @enable_ki_protection
    async def send_eof(self) -> None:
        """Ends our half of the byte stream; see ``trio.abc.HalfCloseableStream``. Messages can still be sent.

        Cancellation: the end may or may not have been sent; call again.

        Raises:
            trio.BusyResourceError: another task is sending on it.
            trio.ClosedResourceError, trio.BrokenResourceError: as for :meth:`send`.
        """
        with self._sending:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._link.check()
            if self._eof_sent:
                await trio.lowlevel.checkpoint()
                return
            pending = self._link.sending.send(wire.STREAM, b"")
            self._eof_sent = True
            try:
                await completed(pending, self._link.engine)
            except trio.Cancelled:
                if pending is not None and pending.waits_for_credit:
                    self._eof_sent = False
                raise
            except MemoryError:
                self._eof_sent = False
                raise

    @enable_ki_protection
    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receives bytes of the byte stream, b"" at its end; see ``trio.abc.ReceiveStream``.

        Cancellation: nothing is lost.

        Raises:
            trio.BusyResourceError: another task is receiving on it.
            trio.ClosedResourceError, trio.BrokenResourceError: as for :meth:`receive`.
            MemoryError, TypeError, ValueError: no memory for the bytes, which stay; a wrong ``max_bytes``.
        """
        if max_bytes is not None:
            max_bytes = check_integer(max_bytes, "max_bytes", 1, 1 << 62)
        with self._receiving:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._link.check()
            engine, receiving = self._link.engine, self._link.receiving
            large = receiving.stream
            limit = stream.READ_SIZE if max_bytes is None else max_bytes
            piece = large.take(max_bytes) if large.rest else receiving.next_piece(limit)
            if piece is None and not receiving.slept and engine.waiting.look():
                piece = receiving.next_piece(limit)
            if piece is not None:
                await engine.waiting.schedule_point()
                return piece
            try:
                piece = await receiving.next(wire.STREAM, limit)
            except trio.EndOfChannel:
                return b""
            if len(piece) > limit:
                large.rest = piece
                piece = large.take(max_bytes)
            return piece

    # ---- closing ----

    @enable_ki_protection
    def abort(self) -> None:
        """Closes by force, at once. A plain function; closed already: no effect.

        Waiting tasks get ``trio.ClosedResourceError``; the peer's get ``trio.BrokenResourceError``, after what was sent
        before has arrived or half a second has passed.

        Raises: nothing.
        """
        self._link.engine.run.check_thread()
        if self._link.engine.usable:
            self._link.abort()

    @enable_ki_protection
    async def aclose(self) -> None:
        """Closes gracefully: everything that was sent, and not cancelled, is delivered to the peer's library first.

        Large messages are delivered when the peer's program receives them. Meanwhile the peer's sends raise
        :class:`PeerClosed`, because nobody would receive them.

        Takes at most ``close_timeout`` seconds. Other tasks' receives end with ``trio.ClosedResourceError``.

        Cancellation: returns at once. The worker finishes the close in the background, within ``close_timeout``, as a
        kernel does for a TCP socket. To close by force, use :meth:`abort`.

        Raises:
            trio.BrokenResourceError: what was sent may not have been delivered, and no operation has said yet that the
                connection is broken. It is closed nevertheless.
        """
        link = self._link
        link.engine.run.check_thread()
        if not link.life.open or not link.engine.usable:
            await trio.lowlevel.checkpoint()
            return
        link.closing.begin()
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            await link.closing.close_gracefully()
        except trio.Cancelled:
            close_in_background(link.engine, link.share, link.closing.close_gracefully)
            raise
        except BaseException:
            link.closing.close_now()
            raise
        await trio.lowlevel.cancel_shielded_checkpoint()

    @enable_ki_protection
    async def wait_closed(self) -> None:
        """Waits until the connection has ended: the peer or this side has closed it, in the background perhaps.

        What has arrived can still be received if this side has not closed it.

        Cancellation: it has no effect.

        Raises:
            trio.BrokenResourceError: the peer is lost (:class:`PeerLost` says how), or what this side had sent before
                its close may not have been delivered; the worker broke. Raised at once, without anybody receiving.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        link = self._link
        await link.share.operations.wait_until(link.is_over)
        await link.engine.waiting.schedule_point()
        link.closing.raise_failure()
        if link.life.broke:
            link.sending.check()

    @enable_ki_protection
    async def ping(self) -> float:
        """Asks the peer's library for an answer, over UCX like a message, and returns the seconds until it has come.

        A peer that is stopped, or whose Trio loop is blocked, does not answer: set a timeout. Unread messages do not
        delay the answer. What arrived before the peer closed can still be received.

        Cancellation: it has no effect.

        Raises:
            trio.ClosedResourceError, trio.BrokenResourceError: this connection was closed; the peer has closed it, or
                is gone.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._link.check()
        seconds = await self._link.ping()
        await self._link.engine.waiting.schedule_point()
        return seconds

    @enable_ki_protection
    async def __aenter__(self) -> Connection:
        return self

    @enable_ki_protection
    async def __aexit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        if exc_type is None:
            await self.aclose()
        else:
            self.abort()
            await trio.lowlevel.cancel_shielded_checkpoint()

    def __del__(self) -> None:
        link = self._link
        if link.life.open and not link.engine.run.inherited:
            warn_resource(f"unclosed {self!r}", self)
            link.on_unclosed = None
            link.engine.run.call_soon(link.abort)

    def __repr__(self) -> str:
        link = self._link
        state = "open"
        if not link.life.open:
            state = "closed"
        elif link.life.graceful:
            state = "closed by the peer"
        elif link.life.broke:
            state = "broken"
        return f"<trio_ucx.Connection to {link.share.label}, {state}>"


@attrs.define(eq=False, repr=False)
class Messages(metaclass=OpenedNotConstructed):
    """The messages of one tag queue: see :meth:`Connection.messages`.

    Cancellation: as :meth:`Connection.messages`.
    """

    _connection: Connection
    _tag: int

    def __aiter__(self) -> Messages:
        return self

    @enable_ki_protection
    async def __anext__(self) -> bytes:
        try:
            return await self._connection.receive(tag=self._tag)
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def __repr__(self) -> str:
        return f"<messages with tag {self._tag} of {self._connection!r}>"


@attrs.define(eq=False, repr=False)
class Conversations(metaclass=OpenedNotConstructed):
    """The conversations that the peer opens: see :meth:`Connection.conversations`.

    Cancellation: as :meth:`Connection.conversations`.
    """

    _connection: Connection

    def __aiter__(self) -> Conversations:
        return self

    @enable_ki_protection
    async def __anext__(self) -> Channel:
        link = self._connection._link
        await trio.lowlevel.checkpoint_if_cancelled()
        link.check()
        conversations = link.receiving.conversations
        while True:
            begun = conversations.take_begun()
            try:
                if begun is not None:
                    await link.engine.waiting.schedule_point()
                else:
                    begun = await link.receiving.wait_conversation()
            except trio.EndOfChannel:
                raise StopAsyncIteration from None
            channel = conversations.accept(begun)
            if channel is not None:
                return Channel._create(self._connection, channel, True)

    def __repr__(self) -> str:
        return f"<conversations of {self._connection!r}>"
