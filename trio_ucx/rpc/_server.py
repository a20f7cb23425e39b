"""The server's side: accepts the calls of a connection, runs their handlers, and answers."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from typing import Any

import attrs
import trio
from trio.lowlevel import disable_ki_protection, enable_ki_protection

from .. import Channel, Connection, MessageTooLong
from .._rules.wire import UNACCEPTED
from .._util.arguments import check_integer
from .._util.handles import OpenedNotConstructed
from ..ucp._internal_api import Signal
from . import _messages as wire
from ._errors import CallRefused
from ._items import ItemFlow
from ._messages import MOST_KEPT, Codec, bounded, decode_call, decode_message, encode_message
from ._service import Method, Service, arrays_of, methods_of, parts, type_name

logger = logging.getLogger("trio_ucx")

#: Called with a method's name and the metadata of a call; its context is that of the call.
Hook = Callable[[str, dict[str, str]], AbstractContextManager[object]]

#: How many tasks of one connection may wait for the next conversation. Others end.
_MOST_ACCEPTING = 8
_GONE = (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError)
#: Of tracebacks, in characters.
_LONGEST_LINE = 500
_NO_CONTEXT = nullcontext()


class _CallerGone(Exception):
    """Nobody waits for the rest of a stream."""


@attrs.define(eq=False)
class Call(metaclass=OpenedNotConstructed):
    """One call, for its handler.

    Cancellation: the handler is cancelled when the caller is, or is gone, and when the time of the call is over.

    Attributes:
        method: the name of the method.
        buffers: the buffers that the client has sent beside the arguments, as memoryviews of writable memory.
        metadata: what the client's hook and its ``metadata=`` have sent along.
        connection: the connection to the client.
    """

    method: str
    buffers: list[memoryview]
    metadata: dict[str, str]
    connection: Connection
    _talk: Channel
    _codec: Codec
    _deadline: float
    _opened_flow: ItemFlow | None = None

    @property
    def _flow(self) -> ItemFlow:
        self._opened_flow = self._opened_flow or ItemFlow(self._talk, self._codec)
        return self._opened_flow

    def time_left(self) -> float:
        """Returns the seconds until the call is cancelled; ``math.inf`` if it has no deadline.

        Raises: nothing.
        """
        return max(self._deadline - trio.current_time(), 0.0)

    def arrays(self) -> list[Any]:
        """Returns the buffers as numpy's arrays, with the dtypes and shapes that were sent; no copies.

        Raises: as :meth:`Reply.arrays`.
        """
        return arrays_of(self.buffers)

    def items(self) -> AsyncIterator[Any]:
        """Returns an iterator over what the client sends with ``Stream.send``, until it has sent everything.

        An item with buffers is a :class:`Reply`. The client waits where the handler does not read fast enough. A step
        raises :class:`CallRefused` if the client has sent something else, and ``trio.BrokenResourceError`` if the
        client is gone.

        Cancellation: a cancelled step loses no item.

        Raises: nothing.
        """
        return _Items(self._flow)


@attrs.define(eq=False)
class _Items(AsyncIterator[Any]):
    # No generator: one that is not read to its end would have to be closed.

    _flow: ItemFlow
    _ended: bool = False

    @enable_ki_protection
    async def __anext__(self) -> Any:
        if self._ended:
            await trio.lowlevel.checkpoint()
            raise StopAsyncIteration
        try:
            kind, value = await self._flow.next()
        except wire.BadMessage as error:
            raise CallRefused(f"the client has sent {error}") from None
        if kind == wire.ITEM:
            return value
        self._ended = True
        raise StopAsyncIteration


def serving(service: Service, *, limit: int = 100, hook: Hook | None = None) -> Callable[[Connection], Awaitable[None]]:
    """Returns a handler for :func:`trio_ucx.serve_ucx` that answers the calls of :func:`trio_ucx.rpc.connect`.

    An exception of a method is sent to the client, and logged (logger ``trio_ucx``) unless the method declares it. When
    the server drains, calls that run are finished, and others refused.

    Args:
        service: the object with the methods.
        limit: how many handlers run at once, for all connections; further calls wait.
        hook: called for each call with the method's name and the metadata that came with it. Returns a context manager,
            in which the handler runs.

    Raises:
        TypeError, ValueError: a wrong argument; an annotation of a method that cannot be checked.
    """
    methods = methods_of(service)
    slots = trio.Semaphore(check_integer(limit, "limit", 1, 2**31))

    @enable_ki_protection
    async def answer_calls(connection: Connection) -> None:
        await _Serving(connection, methods, slots, limit, hook).run()

    return answer_calls


@attrs.define(eq=False)
class _Serving:
    """The calls of one connection.

    A client makes one call after the other in the same conversation. Each task accepts one, and answers its calls until
    the client leaves it, or a call is cancelled. One task waits for the next conversation, unless ``limit`` are busy.

    Attributes:
        accepting: how many tasks wait for a conversation.
        busy: how many conversations have a call that was not answered yet.
        kept: those that wait for their next call, the one that has waited for the longest time first.
        refuses: whether late calls are refused.
    """

    connection: Connection
    methods: dict[str, Method]
    slots: trio.Semaphore
    limit: int
    hook: Hook | None
    accepting: int = 0
    busy: int = 0
    kept: dict[Channel, None] = attrs.field(factory=dict)
    refuses: bool = False
    workers: trio.Nursery | None = None
    refusing: trio.Nursery | None = None

    async def run(self) -> None:
        async with trio.open_nursery() as self.refusing:
            async with trio.open_nursery() as self.workers:
                self.see_to_the_next()
            self.refusing.cancel_scope.cancel()

    def see_to_the_next(self) -> None:
        """Lets a task wait for the next conversation, if one is needed."""
        if not self.accepting and self.busy < self.limit and self.workers is not None:
            self.accepting += 1
            self.workers.start_soon(self.work, name=f"rpc {self.connection!r}")

    async def work(self) -> None:
        try:
            while await self.accept_until_cancelled():
                pass
        except trio.ClosedResourceError:
            return  # a handler has closed the connection
        finally:
            self.accepting -= 1
        if self.connection.draining and not self.refuses and self.refusing is not None:
            self.refuses = True
            self.refusing.start_soon(self.refuse_late_calls)
            for talk in list(self.kept):
                talk._close()

    async def accept_until_cancelled(self) -> bool:
        """Returns True if a call was cancelled, and False if this task is not needed any more."""
        scope = _CallScope()
        with scope.cancel_scope:
            async for talk in self.connection.conversations():
                self.accepting -= 1
                try:
                    await self.converse(talk, scope)
                finally:
                    self.accepting += 1
                if self.accepting > _MOST_ACCEPTING:
                    return False
            return False
        return True

    async def refuse_late_calls(self) -> None:
        """Refuses the calls that come while the server drains and others are still running."""
        link, receiving = self.connection._link, self.connection._link.receiving
        message = failure(wire.CODECS[wire.JSON], wire.DRAINING, "the server shuts down")
        while True:
            while (begun := receiving.take_begun()) is not None:
                state = receiving.conversations.accept(int.from_bytes(begun, "little"))
                if state is not None:
                    talk = Channel._create(self.connection, state, True)
                    with suppress(trio.WouldBlock, *_GONE):  # else the end of the connection says it
                        talk.send_nowait(message)
                    talk._close()
            signal = Signal()
            with receiving.watching((UNACCEPTED,), signal):
                await link.engine.waiting.wait(signal)

    # ---- one conversation ----

    async def converse(self, talk: Channel, scope: _CallScope) -> None:
        """Answers the calls of a conversation. Leaves it by force if there is one that was not answered."""
        first = answered = True
        try:
            while True:
                try:
                    data = talk._take_ready() if first else None
                    if data is None:
                        data = await self.next_call(talk)
                except MessageTooLong as error:
                    await talk._send_last(_unreadable(error))
                    return
                if self.connection.draining and not first:
                    return
                first = answered = False
                self.busy += 1
                self.see_to_the_next()
                try:
                    message = await self.answer(talk, scope, data)
                    if message is None:
                        return
                    keep = wire.is_reply(message)
                    await (talk._send_unscheduled if keep else talk._send_last)(message)
                finally:
                    self.busy -= 1
                answered = True
                if not keep:
                    return
                self.see_to_the_next()
        except _GONE:  # of the conversation: those of handlers were caught before
            pass
        finally:
            talk._close(by_force=not answered)

    async def next_call(self, talk: Channel) -> bytes:
        if len(self.kept) >= MOST_KEPT:
            next(iter(self.kept))._close()
        self.kept[talk] = None
        try:
            return await talk.receive()
        finally:
            del self.kept[talk]

    async def answer(self, talk: Channel, scope: _CallScope, data: bytes) -> Any:
        """Returns the message with the answer to a call; None if nobody waits for one."""
        begun_at = trio.current_time()
        try:
            self.slots.acquire_nowait()
        except trio.WouldBlock:
            if not await _wait_for_slot(talk, self.slots):
                return None
        try:
            return await self.result(talk, scope, data, begun_at)
        finally:
            self.slots.release()

    async def result(self, talk: Channel, scope: _CallScope, data: bytes, begun_at: float) -> Any:
        codec = wire.CODECS[wire.JSON]
        try:
            codec, kind, head, buffers = decode_message(data)
            if kind != wire.CALL:
                raise wire.BadMessage(f"a message of kind {kind}, which begins no call")
            name, left, metadata, encoded = decode_call(codec, head)
        except wire.BadMessage as error:
            return _unreadable(error, codec)
        found = self.methods.get(name)
        if found is None:
            return failure(codec, wire.UNKNOWN_METHOD, f"the server has no method {bounded(name, 100)!r}")
        try:
            arguments = found.checks[codec](encoded)
        except (ValueError, RecursionError) as error:
            return failure(codec, wire.BAD_ARGUMENTS, bounded(f"{name}: {error}"))
        deadline = math.inf if left is None else begun_at + left
        call = Call._create(name, buffers, metadata or {}, self.connection, talk, codec, deadline)
        message = None
        scope.begin(talk, deadline)
        try:
            message = await self.run_handler(found, call, codec, arguments)
        finally:
            if scope.end() and message is None:
                with suppress(trio.WouldBlock, *_GONE):
                    talk.send_nowait(failure(codec, wire.DEADLINE, f"{name}: the deadline has passed"))
                    talk._close()
        return message

    async def run_handler(self, found: Method, call: Call, codec: Codec, arguments: dict[str, Any]) -> Any:
        try:
            with _NO_CONTEXT if self.hook is None else self.hook(call.method, call.metadata):
                if found.declaration.stream:
                    await _stream(found.function, call, arguments)
                    return encode_message(codec, wire.END, None)
                value, buffers = parts(await _run(found.function, call, arguments))
            return encode_message(codec, wire.REPLY, value, buffers)
        except _CallerGone:
            return None
        except Exception as error:
            return _raised(found, call, codec, error)
        except BaseExceptionGroup as group:  # what a handler with a nursery raises if it fails when it is cancelled
            cancelled, rest = group.split(trio.Cancelled)
            if cancelled is None or not isinstance(rest, Exception):
                raise
            _raised(found, call, codec, rest)  # logs it: nobody waits for the answer
            raise cancelled from None


class _CallScope:
    """A cancel scope for the calls of one task, which runs them one after the other, until one of them is cancelled.

    (A scope for each would cost more than the rest of a call.) It is cancelled at the deadline of the call, and when
    the peer leaves the conversation or the connection ends, as with ``Channel.cancel_when_left``. If this side ends the
    connection, the client is told before that the call was broken off: it may have run.
    """

    __slots__ = ("_deadline", "_left", "_talk", "cancel_scope")

    def __init__(self) -> None:
        self.cancel_scope = trio.CancelScope()
        self._left = False
        self._deadline = math.inf
        self._talk: Channel | None = None

    def begin(self, talk: Channel, deadline: float) -> None:
        self._talk, self._deadline, self._left = talk, deadline, False
        if talk._at_end(self._ended):
            self._left = True
            self._cancel(talk)
        elif deadline != math.inf:
            self.cancel_scope.deadline = deadline

    def end(self) -> bool:
        """The call is over. Returns True if its deadline has passed, and somebody may want to know."""
        assert self._talk is not None
        self._talk._state.on_end = ()
        self._talk = None
        if self._deadline == math.inf:
            return False
        passed = self.cancel_scope.cancel_called and not self._left
        self.cancel_scope.deadline = math.inf
        return passed

    def _ended(self) -> None:
        talk = self._talk
        if talk is not None and not self._left:
            self._left = True
            talk._close(by_force=True)
            # Cancelled later: not while messages are delivered.
            trio.lowlevel.current_trio_token().run_sync_soon(self._cancel, talk)

    def _cancel(self, talk: Channel) -> None:
        if self._talk is talk:
            self.cancel_scope.cancel()


async def _wait_for_slot(talk: Channel, slots: trio.Semaphore) -> bool:
    """Returns False if the caller leaves before."""
    got = False
    with talk.cancel_when_left():
        await slots.acquire()
        got = True
    return got


# ---- the user's code: KeyboardInterrupt may be raised anywhere in it ----


@disable_ki_protection
async def _run(function: Callable[..., Awaitable[Any]], call: Call, arguments: dict[str, Any]) -> Any:
    return await function(call, **arguments)


@disable_ki_protection
async def _stream(function: Callable[..., Any], call: Call, arguments: dict[str, Any]) -> None:
    async with aclosing(function(call, **arguments)) as generator:
        async for item in generator:
            try:
                await call._flow.send(*parts(item))
            except _GONE:
                raise _CallerGone from None
            except wire.BadMessage as error:
                raise CallRefused(f"the client has sent {error}") from None


# ---- answers ----


def failure(codec: Codec, category: int, text: str, kind: str = "", trace: str = "", arguments: Any = None) -> Any:
    return encode_message(codec, wire.ERROR, [category, kind, text, trace, arguments])


def _unreadable(error: Exception, codec: Codec = wire.CODECS[wire.JSON]) -> Any:
    return failure(codec, wire.REFUSED, bounded(f"the server cannot read the call: {error}"))


def _raised(found: Method, call: Call, codec: Codec, error: Exception) -> Any:
    """The message about an exception of a handler."""
    name, trace = type_name(type(error)), ""
    for declared in found.declaration.raises:
        if isinstance(error, declared):
            name = type_name(declared)
            break
    else:
        logger.error("%r: the method %s failed", call.connection, call.method, exc_info=error)
        lines = "".join(traceback.format_exception(error)).splitlines()
        trace = bounded("\n".join(line[:_LONGEST_LINE] for line in lines)[-wire.MOST_TRACEBACK :], wire.MOST_TRACEBACK)
    text = _text(error)
    plain = all(each is None or isinstance(each, (str, int, float, bool)) for each in error.args)
    try:
        return failure(codec, wire.RAISED, text, bounded(name, 200), trace, error.args if plain else [text])
    except (TypeError, ValueError):
        return failure(codec, wire.RAISED, text, bounded(name, 200), trace, [text])


def _text(error: Exception) -> str:
    try:
        return bounded(str(error))
    except Exception:
        return "its text could not be made"
