"""Channels within a Connection: conversations, and channels over tags for code that expects Trio's channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ._errors import PeerClosed
from ._link import ChannelState
from ._opening.options import check_max_size
from ._rules.wire import UNACCEPTED
from ._util.handles import OpenedNotConstructed
from .ucp._internal_api import Buffer, Pending, WritableBuffer, about, completed, separate

if TYPE_CHECKING:
    from ._connection import Connection


@attrs.define(eq=False, repr=False)
class Channel(trio.abc.Channel[bytes], metaclass=OpenedNotConstructed):
    """Messages in both directions within a :class:`Connection`, with an end of their own.

    :meth:`Connection.open_conversation` and :meth:`Connection.conversations` give one a private pair of tag queues;
    :meth:`Connection.channel` makes one of a tag. All channels share the window of the connection.

    Each side closes its end with :meth:`aclose`, or by leaving the block. Then the peer receives what it has sent
    before, and after that ``trio.EndOfChannel``; what the peer has sent and sends meanwhile is dropped.

    Leaving the block with an exception, or cancelled, breaks the channel off: then the peer gets :class:`PeerLost`, and
    a conversation that it has not accepted yet is withdrawn. If the peer opened the conversation, ``async with``
    suppresses the errors that say that the peer has closed its end, or broken it off.

    Cancellation: a cancelled block closes this end.
    """

    _connection: Connection
    _state: ChannelState
    _absorbs: bool = False

    @property
    def connection(self) -> Connection:
        """The connection that it belongs to."""
        return self._connection

    @property
    def peer_left(self) -> bool:
        """True if the peer has closed its end. What has arrived can be received."""
        return self._state.peer_left

    @property
    def _over(self) -> bool:
        """True if either side has left it, or the connection has ended."""
        return self._state.problem() is not None or self._connection._link.sending.over

    def _check(self) -> None:
        if self._state.left:
            raise trio.ClosedResourceError("this channel was closed")
        self._connection._link.check()

    def _check_send(self) -> None:
        problem = self._state.problem()
        if problem is None and self._connection._link.life.peer_stopped:
            problem = about(self._state.origin, PeerClosed("the peer closed the connection"))
        if problem is not None:
            raise problem
        self._connection._link.check()

    @enable_ki_protection
    async def send(self, value: Buffer) -> None:
        """Sends one message; see :meth:`Connection.send`.

        Cancellation: as :meth:`Connection.send`.

        Raises:
            PeerClosed: the peer has closed its end, perhaps meanwhile. (A large message that was under way is dropped
                then, and its send returns.)
            trio.ClosedResourceError: this end was closed, perhaps meanwhile; or the connection.
            trio.BrokenResourceError, TypeError, ValueError, RuntimeError, MemoryError: as :meth:`Connection.send`.
        """
        link = self._connection._link
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_send()
        await link.send(self._state.number, value)

    def _begin_send(self, value: Buffer) -> Pending | None:
        """Sends a message, as :meth:`send` does. Returns what is to be waited for with ``completed``, if anything.

        Raises: as :meth:`send`; then nothing was sent.
        """
        sending = self._connection._link.sending
        self._check_send()
        sent = sending.send_short(self._state.number, value)
        return None if sent is True else sent or sending.send(self._state.number, value)

    async def _send_unscheduled(self, value: Buffer) -> None:
        """Sends a message as :meth:`send` does; but a small one passes no schedule point, as the next receive does."""
        sent = self._begin_send(value)
        if sent is not None:
            await completed(sent, self._connection._link.engine)

    async def _send_last(self, value: Buffer) -> None:
        """Sends a message as :meth:`_send_unscheduled`, and closes this end: one message if it is a small one."""
        sending = self._connection._link.sending
        sending.expect_more()
        await self._send_unscheduled(value)
        self._close()
        sending.flush()

    @enable_ki_protection
    def send_nowait(self, value: Buffer) -> None:
        """Sends one message without waiting; see :meth:`Connection.send_nowait`.

        Raises:
            PeerClosed: the peer has closed its end.
            trio.ClosedResourceError: this end was closed, or the connection.
            trio.WouldBlock, trio.BrokenResourceError, TypeError, ValueError, RuntimeError: as
                :meth:`Connection.send_nowait`.
        """
        link = self._connection._link
        self._check_send()
        link.send_nowait(self._state.number, value)

    @enable_ki_protection
    async def receive(self, *, max_size: int | None = None) -> bytes:
        """Receives the next message; see :meth:`Connection.receive`.

        Cancellation: nothing is lost.

        Raises:
            trio.EndOfChannel: the peer has closed its end, or the connection, and all its messages were received.
            trio.ClosedResourceError: this end was closed, perhaps meanwhile; or the connection.
            MessageTooLong, trio.BrokenResourceError, MemoryError: as :meth:`Connection.receive`.
            TypeError, ValueError: a wrong ``max_size``.
        """
        link = self._connection._link
        limit = link.receiving.max_message_size if max_size is None else check_max_size(max_size)
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        return await link.receive(self._state.number, limit)

    @enable_ki_protection
    async def receive_newest(self, *, max_size: int | None = None) -> bytes:
        """Receives the newest message, and drops older ones; see :meth:`Connection.receive_newest`.

        Cancellation: as :meth:`Connection.receive_newest`.

        Raises: as :meth:`receive`.
        """
        link = self._connection._link
        limit = link.receiving.max_message_size if max_size is None else check_max_size(max_size)
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        return await link.receive_newest(self._state.number, limit)

    def _first(self) -> bytes | None:
        """Returns the next message, which stays; None if it is not there."""
        return self._connection._link.receiving.look(self._state.number)

    def _take_ready(self) -> bytes | None:
        """Takes the next message if it is there; see :meth:`Receiving.take_ready`."""
        self._check()
        receiving = self._connection._link.receiving
        return receiving.take_ready(self._state.number, receiving.max_message_size)

    @enable_ki_protection
    async def receive_into(self, buffer: WritableBuffer, *, exact: bool = False) -> int:
        """Receives the next message into a buffer; see :meth:`Connection.receive_into`.

        Cancellation: as :meth:`Connection.receive_into`.

        Raises: as :meth:`Connection.receive_into`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check()
        return await self._connection._link.receive_into(self._state.number, buffer, exact=exact)

    @enable_ki_protection
    async def send_array(self, array: Any) -> None:
        """Sends an array; see :meth:`Connection.send_array`.

        Cancellation: as :meth:`Connection.send`.

        Raises:
            PeerClosed: the peer has closed its end.
            trio.ClosedResourceError: this end was closed, or the connection.
            trio.BrokenResourceError, TypeError, ValueError, RuntimeError, MemoryError: as
                :meth:`Connection.send_array`.
        """
        from ._arrays.messages import message_of

        await self.send(message_of(array))

    @enable_ki_protection
    async def receive_array(self, *, out: Any = None, allocate: Callable[[int], Any] | None = None) -> Any:
        """Receives the next message, which has one array; see :meth:`Connection.receive_array`.

        Cancellation: as :meth:`Connection.receive_array`.

        Raises:
            trio.EndOfChannel: the peer has closed its end, or the connection, and all its messages were received.
            trio.ClosedResourceError: this end was closed, or the connection.
            UnexpectedMessage, MessageTooLong, trio.BrokenResourceError: as :meth:`Connection.receive_array`.
            TypeError, ValueError, ImportError, RuntimeError, MemoryError: as :meth:`Connection.receive_array`.
        """
        from ._arrays.messages import receive

        return await receive(self._connection._link, self._state.number, self._check, True, out, allocate)

    @enable_ki_protection
    async def send_arrays(self, arrays: Mapping[str, Any] | Sequence[Any]) -> None:
        """Sends a list or a dict of arrays; see :meth:`Connection.send_arrays`.

        Cancellation: as :meth:`Connection.send`.

        Raises:
            PeerClosed: the peer has closed its end.
            trio.ClosedResourceError: this end was closed, or the connection.
            trio.BrokenResourceError, TypeError, ValueError, RuntimeError, MemoryError: as
                :meth:`Connection.send_array`.
        """
        from ._arrays.messages import message_of_many

        await self.send(message_of_many(arrays))

    @enable_ki_protection
    async def receive_arrays(
        self,
        *,
        into: Mapping[str, Any] | Sequence[Any] | None = None,
        allocate: Callable[[int], Any] | None = None,
    ) -> Any:
        """Receives the next message, which has a list or a dict of arrays; see :meth:`Connection.receive_arrays`.

        Cancellation: as :meth:`Connection.receive_array`.

        Raises:
            trio.EndOfChannel: the peer has closed its end, or the connection, and all its messages were received.
            trio.ClosedResourceError: this end was closed, or the connection.
            UnexpectedMessage, MessageTooLong, trio.BrokenResourceError: as :meth:`Connection.receive_array`.
            TypeError, ValueError, ImportError, RuntimeError, MemoryError: as :meth:`Connection.receive_array`.
        """
        from ._arrays.messages import receive

        return await receive(self._connection._link, self._state.number, self._check, False, into, allocate)

    @enable_ki_protection
    def receive_nowait(self, *, max_size: int | None = None) -> bytes:
        """Receives the next message if it has arrived; see :meth:`Connection.receive_nowait`.

        Raises:
            trio.WouldBlock: it has not.
            trio.EndOfChannel, trio.ClosedResourceError, trio.BrokenResourceError: as :meth:`receive`.
            MessageTooLong, MemoryError, TypeError, ValueError: as :meth:`receive`.
        """
        receiving = self._connection._link.receiving
        limit = receiving.max_message_size if max_size is None else check_max_size(max_size)
        self._check()
        return receiving.receive_nowait(self._state.number, limit)

    @contextmanager
    @enable_ki_protection
    def cancel_when_left(self) -> Iterator[trio.CancelScope]:
        """A context manager that cancels its block when the peer leaves this channel, or the connection ends.

        If this side closes its end first, the block goes on.

        What works on a request in such a block stops when nobody waits for the answer any more. The block's value is
        the ``trio.CancelScope``: its ``cancelled_caught`` says whether that has happened, and it can have a deadline,
        too. Entering and leaving the block are no checkpoints.

        Raises:
            trio.ClosedResourceError: this end was closed, or the connection.
        """
        self._check()
        token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as scope:

            def cancel() -> None:
                token.run_sync_soon(scope.cancel)  # not while messages are delivered: it ends receives

            if self._at_end(cancel):
                scope.cancel()
            try:
                yield scope
            finally:
                self._state.on_end = tuple(one for one in self._state.on_end if one is not cancel)

    def _at_end(self, function: Callable[[], None]) -> bool:
        """Calls a function, once, when the peer leaves, or the connection ends. Returns True if that has happened."""
        self._state.on_end += (function,)
        return self._over

    @enable_ki_protection
    async def aclose(self) -> None:
        """Closes this end. Other tasks' operations here end with ``trio.ClosedResourceError``.

        What was sent before is delivered as long as the connection is.

        Cancellation: it is closed all the same.

        Raises: nothing, closed already or not.
        """
        self._close()
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._connection._link.engine.waiting.schedule_point()

    def _close(self, *, by_force: bool = False) -> None:
        link = self._connection._link
        link.engine.run.check_thread()
        link.receiving.conversations.leave(self._state, by_force=by_force)

    @enable_ki_protection
    async def __aexit__(  # type: ignore[override]  # Trio's returns None: it never absorbs an error
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if exc is None:
            await self.aclose()
            return False
        self._close(by_force=True)
        await trio.lowlevel.cancel_shielded_checkpoint()
        rest = separate(exc, self._state.origin)[1] if self._absorbs else exc
        if rest is not None and rest is not exc:
            raise rest
        return rest is None

    def __repr__(self) -> str:
        state = "closed" if self._state.left else "left by the peer" if self._state.peer_left else "open"
        name = "conversation" if self._state.number > UNACCEPTED else f"channel with tag {self._state.number}"
        return f"<{name} of {self._connection!r}, {state}>"
