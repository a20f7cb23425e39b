"""The server's side: accepts the calls of a connection, runs their handlers, and answers."""

from __future__ import annotations

import logging
import math
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import attrs
import trio
from trio.lowlevel import disable_ki_protection, enable_ki_protection

from .. import Channel, Connection, MessageTooLong
from .._util.arguments import check_integer
from .._util.handles import OpenedNotConstructed
from ..ucp._internal_api import separate
from . import _messages as wire
from ._errors import CallError
from ._items import ItemFlow
from ._messages import MOST_KEPT, Codec, bounded, decode_call, decode_message, encode_message
from ._service import Method, Service, arrays_of, methods_of, parts, type_name

logger = logging.getLogger("trio_ucx")

#: Called with a method's name and the metadata of a call; its context is that of the call.
Hook = Callable[[str, dict[str, str]], AbstractContextManager[object]]

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
    buffers: Sequence[memoryview]
    metadata: dict[str, str]
    connection: Connection
    _talk: Channel
    _codec: Codec
    _scope: trio.CancelScope
    _deadline: float
    _has_items: bool
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

        There are none if it was called with :meth:`Client.call`. An item with buffers is a :class:`Reply`. The client
        waits where the handler does not read fast enough. A step raises :class:`CallError` if the client has sent
        something else. If the client has left the call, or is gone, the handler is cancelled; a step that is shielded
        from that raises :class:`trio_ucx.PeerLost`.

        Cancellation: a cancelled step loses no item.

        Raises: nothing.
        """
        return _Items(self, ended=not self._has_items)


@attrs.define(eq=False)
class _Items(AsyncIterator[Any]):
    # No generator: one that is not read to its end would have to be closed.

    _call: Call
    _ended: bool

    @enable_ki_protection
    async def __anext__(self) -> Any:
        if self._ended:
            await trio.lowlevel.checkpoint()
            raise StopAsyncIteration
        try:
            kind, value = await self._call._flow.next()
        except wire.BadMessage as error:
            raise CallError(f"the client has sent {error}") from None
        except _GONE:
            self._call._scope.cancel()  # as the end of the conversation does in a moment
            await trio.lowlevel.checkpoint()
            raise self._call._talk._state.broken_off() from None
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

    answer_calls.__qualname__ = f"rpc.serving({type(service).__name__})"  # for logs and reports
    return answer_calls


@attrs.define(eq=False)
class _Serving:
    """The calls of one connection: a task for each conversation, in which a client makes one call after the other.

    Attributes:
        busy: how many conversations have a call that was not answered yet. While there are ``limit`` of them, no
            further conversation is accepted.
        room: set when one of them is not busy any more.
        kept: the idle conversations, that which has been idle for the longest time first.
        running: the methods that run.
        cut_off: how many calls of each method ran when the connection ended.
    """

    connection: Connection
    methods: dict[str, Method]
    slots: trio.Semaphore
    limit: int
    hook: Hook | None
    busy: int = 0
    room: trio.Event = attrs.field(factory=trio.Event)
    kept: dict[Channel, None] = attrs.field(factory=dict)
    running: dict[Channel, str] = attrs.field(factory=dict)
    cut_off: Counter[str] = attrs.field(factory=Counter)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            with suppress(trio.ClosedResourceError):  # a handler has closed the connection
                try:
                    await self.accept(nursery)
                except trio.BrokenResourceError as error:
                    if self.cut_off:  # for the log
                        names = (name if n == 1 else f"{name} ({n} calls)" for name, n in self.cut_off.most_common())
                        error.add_note(f"and cancelled {bounded(', '.join(names), 500)}")
                    raise
            for talk in list(self.kept):  # the server drains
                talk._close()

    async def accept(self, nursery: trio.Nursery) -> None:
        async for talk in self.connection.conversations():
            if self.connection.draining:
                talk._close()  # the client makes the call again, elsewhere
                continue
            self.busy += 1
            nursery.start_soon(self.converse, talk, name=f"rpc {self.connection!r}")
            while self.busy >= self.limit:
                self.room = trio.Event()
                await self.room.wait()

    @enable_ki_protection
    async def converse(self, talk: Channel) -> None:
        """Answers the calls of a conversation. Leaves it by force if there is one that was not answered."""
        answered = True

        def break_off() -> None:
            if talk in self.running and self.connection._link.sending.over:
                self.cut_off[self.running[talk]] += 1
            talk._close(by_force=not answered)

        try:
            with talk.cancel_when_left() as scope:
                talk._at_end(break_off)
                ready = talk._take_ready()
                data = await talk.receive() if ready is None else ready
                while True:
                    answered = False
                    message = await self.answer(talk, scope, data)
                    if message is None:
                        return
                    try:
                        if not wire.is_reply(message):
                            await talk._send_last(message)
                            return
                        await talk._send_unscheduled(message)
                    except (MessageTooLong, *_GONE):
                        raise
                    except Exception as error:  # a buffer of the answer cannot be sent
                        logger.error("%r: the method's answer cannot be sent", self.connection, exc_info=error)
                        with suppress(Exception):  # else the client learns only that the call was lost
                            await talk._send_last(_unsendable(error))
                        return
                    answered = True
                    data = await self.next_call(talk)
        except MessageTooLong as error:
            with suppress(*_GONE):
                await talk._send_last(_unreadable(error))
        except _GONE:  # of the conversation: those of handlers were caught before
            pass
        finally:
            talk._close(by_force=not answered)
            self.not_busy()

    async def next_call(self, talk: Channel) -> bytes:
        """Keeps a conversation until its next call comes.

        Raises:
            trio.ClosedResourceError: it was closed meanwhile.
            Others: as ``Channel.receive``.
        """
        self.check(talk)
        if len(self.kept) >= MOST_KEPT:
            self.close_oldest()
        self.kept[talk] = None
        self.not_busy()
        try:
            data = await talk.receive()
        finally:
            self.busy += 1
            self.kept.pop(talk, None)
        self.check(talk)
        return data

    def close_oldest(self) -> None:
        """Closes the conversation that has been idle longest. (A task that kept a reference would keep many more.)"""
        oldest = next(iter(self.kept))
        del self.kept[oldest]
        oldest._close()

    def check(self, talk: Channel) -> None:
        """Raises an error if the server drains, or has closed a conversation: then the client makes the call again."""
        if self.connection.draining:
            raise trio.ClosedResourceError
        talk._check()

    def not_busy(self) -> None:
        self.busy -= 1
        self.room.set()

    async def answer(self, talk: Channel, scope: trio.CancelScope, data: bytes) -> Any:
        """Returns the message with the answer to a call; None if nobody waits for one."""
        begun_at = trio.current_time()
        try:
            self.slots.acquire_nowait()
        except trio.WouldBlock:
            await self.slots.acquire()
        try:
            return await self.result(talk, scope, data, begun_at)
        finally:
            self.slots.release()

    async def result(self, talk: Channel, scope: trio.CancelScope, data: bytes, begun_at: float) -> Any:
        codec = wire.CODECS[wire.JSON]
        try:
            codec, kind, head, buffers = decode_message(data)
            if kind not in (wire.CALL, wire.STREAM):
                raise wire.BadMessage(f"a message of kind {kind}, which begins no call")
            name, left, metadata, encoded = decode_call(codec, head)
        except wire.BadMessage as error:
            return _unreadable(error, codec)
        found = self.methods.get(name)
        if found is None:
            return failure(codec, wire.UNKNOWN_METHOD, f"the server has no method {bounded(name, 100)!r}")
        if found.declaration.stream and kind == wire.CALL:
            return failure(codec, wire.UNKNOWN_METHOD, f"{name} is a stream: use Client.stream")
        try:
            arguments = found.checks[codec](encoded)
        except Exception as error:
            return failure(codec, wire.BAD_ARGUMENTS, bounded(f"{name}: {error}"))
        deadline = math.inf if left is None else begun_at + left
        call = Call._create(
            name, buffers or (), metadata or {}, self.connection, talk, codec, scope, deadline, kind == wire.STREAM
        )
        if left is None:
            return await self.run_handler(found, call, codec, arguments)
        message = None
        scope.deadline = deadline
        try:
            message = await self.run_handler(found, call, codec, arguments)
        finally:
            scope.deadline = math.inf
            if message is None and trio.current_time() >= deadline:
                with suppress(trio.WouldBlock, *_GONE):
                    talk.send_nowait(failure(codec, wire.DEADLINE, f"{name}: the deadline has passed"))
                    talk._close()
        return message

    async def run_handler(self, found: Method, call: Call, codec: Codec, arguments: dict[str, Any]) -> Any:
        self.running[call._talk] = call.method
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
        finally:
            del self.running[call._talk]


# ---- the user's code: KeyboardInterrupt may be raised anywhere in it ----


@disable_ki_protection
async def _run(function: Callable[..., Awaitable[Any]], call: Call, arguments: dict[str, Any]) -> Any:
    return await function(call, **arguments)


@disable_ki_protection
async def _stream(function: Callable[..., Any], call: Call, arguments: dict[str, Any]) -> None:
    generator = function(call, **arguments)
    try:
        async for item in generator:
            try:
                await call._flow.send(*parts(item))
            except _GONE:
                raise _CallerGone from None
            except wire.BadMessage as error:
                raise CallError(f"the client has sent {error}") from None
    finally:
        try:
            await generator.aclose()
        except BaseExceptionGroup as group:  # a nursery around a yield puts the GeneratorExit into one
            rest = group.split(GeneratorExit)[1]
            if rest is not None:
                raise rest from None


# ---- answers ----


def failure(codec: Codec, category: int, text: str, kind: str = "", trace: str = "", arguments: Any = None) -> Any:
    return encode_message(codec, wire.ERROR, [category, kind, text, trace, arguments])


def _unreadable(error: Exception, codec: Codec = wire.CODECS[wire.JSON]) -> Any:
    return failure(codec, wire.REFUSED, bounded(f"the server cannot read the call: {error}"))


def _unsendable(error: Exception) -> Any:
    return failure(wire.CODECS[wire.JSON], wire.RAISED, f"the answer cannot be sent: {error}", type_name(type(error)))


def _raised(found: Method, call: Call, codec: Codec, error: Exception) -> Any:
    """Returns the message about an exception of a handler; None if it says only that the client is gone."""
    if call._talk._over:
        rest = separate(error, call.connection._link.share.ending.origin)[1]
        if not isinstance(rest, Exception):
            return None
        error = rest
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
