"""The client's side: calls and streams."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from .. import Channel, Connection, PeerClosed
from .._util.arguments import check_integer, check_timeout
from .._util.contained import contained
from .._util.handles import OpenedNotConstructed, dropped, warn_resource
from ..ucp._internal_api import completed
from . import _messages as wire
from ._connections import ClientConnection, GivenConnection, ReopenedConnections
from ._errors import BadArguments, CallError, CallLost, CallRefused, CallTimedOut, RemoteError, UnknownMethod
from ._items import ItemFlow
from ._messages import DEFAULT, RESERVED, bounded, decode_head, decode_message, encode_message
from ._server import Hook
from ._service import Service, check_errors, declarations, type_name, whole

_REFUSALS = {wire.UNKNOWN_METHOD: UnknownMethod, wire.BAD_ARGUMENTS: BadArguments, wire.REFUSED: CallRefused}
#: The most attempts for an idempotent call that may have run. (The call may be what kills the server.)
_ATTEMPTS = 3


class _DeadlinePassed(Exception):
    """The server has cancelled a handler at its deadline."""


@attrs.define(eq=False)
class _Request:
    """A call, and whether the server may have run it."""

    method: str
    arguments: dict[str, Any]
    buffers: Sequence[Any] | None
    metadata: Mapping[str, str] | None
    kind: int = wire.CALL
    may_have_run: bool = False

    def message(self) -> Any:
        """Returns what is sent, which says how much time is left.

        Raises:
            TypeError, ValueError: it cannot be encoded.
        """
        deadline = trio.current_effective_deadline()
        left = None if deadline == math.inf else max(deadline - trio.current_time(), 0.0)
        return encode_message(DEFAULT, self.kind, [self.method, left, self.metadata, self.arguments], self.buffers)

    def lost(self, error: Exception, *, may_have_run: bool) -> CallLost:
        ended = isinstance(error, trio.EndOfChannel)
        why = "the server shuts down, or has closed the connection, and has not run the call" if ended else error
        lost = CallLost(f"{self.method}: {why}", may_have_run=may_have_run)
        lost.__cause__ = error
        return lost


class Client:
    """Calls methods of a server: over a connection that you have opened, or that :func:`connect` keeps open.

    Args:
        connection: a connection to a server that runs :func:`serving`. The client does not close it. Messages with
            tags can go over it, too; conversations belong to the calls.
        limit: how many calls and streams may be in flight; others wait.
        service: the server's class, if this side has it: its methods' ``idempotent=`` and ``raises=`` are used.
        errors: more exceptions that are raised as what they are when a handler raises them. Others are
            :class:`RemoteError`.
        hook: called for each call with the method's name and its metadata, a dict of strings that it may add to; the
            server's hook gets them. Returns a context manager, in which the call is made.

    Cancellation: of its operations, see :meth:`call` and :meth:`stream`.

    Raises:
        TypeError, ValueError: a wrong argument.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        limit: int = 1000,
        service: type[Service] | None = None,
        errors: Iterable[type[Exception]] = (),
        hook: Hook | None = None,
    ) -> None:
        connections: object = connection  # of ``connect``: ReopenedConnections
        if not isinstance(connections, (Connection, ReopenedConnections)):
            raise TypeError(f"a trio_ucx.Connection is needed, not {type(connection).__name__}")
        declared = {} if service is None else declarations(service)
        classes = [*check_errors(errors), *(kind for each in declared.values() for kind in each.raises)]
        self._connections = GivenConnection(connections) if isinstance(connections, Connection) else connections
        self._slots = trio.Semaphore(check_integer(limit, "limit", 1, 2**31))
        self._errors = {f"__main__.{each.__qualname__}": each for each in classes}  # of a server that is a script
        self._errors |= {type_name(each): each for each in classes}
        self._idempotent = frozenset(name for name, each in declared.items() if each.idempotent)
        self._hook = hook

    @enable_ki_protection
    async def call(
        self,
        method: str,
        /,
        *,
        timeout: float | None = None,
        buffers: Sequence[Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        idempotent: bool = False,
        **arguments: Any,
    ) -> Any:
        """Calls a method of the server, and returns its result.

        Args:
            method: its name.
            timeout: seconds for everything: waiting for a connection, or for other calls, included. The deadlines of
                cancel scopes around the call count, too. The time that is left travels to the handler.
            buffers: a list of what to send beside the arguments without a copy: bytes, arrays, whatever
                :meth:`.Connection.send_arrays` takes.
            metadata: strings for the server's hook and handler.
            idempotent: calling the method twice does no harm: :func:`connect`'s client repeats the call if it may have
                run when the connection is lost. A call that has certainly not run is repeated anyway.
            arguments: of the method.

        Returns:
            The value that the method has returned; if it has sent buffers, a :class:`Reply` with them.

        Cancellation: returns at once, and cancels the handler. Buffers may stay pinned, and must not be changed, until
        :meth:`.Connection.wait_buffers_released` returns.

        Raises:
            RemoteError: the method raised an exception; or that exception itself, if ``errors=`` or ``service=`` has
                its type.
            UnknownMethod, BadArguments, CallRefused: the server did not run the call.
            CallLost: the connection ended, or the server broke the call off; ``may_have_run`` says whether the method
                may have run.
            CallTimedOut: ``timeout`` has passed.
            CallError: the answer cannot be read.
            TypeError, ValueError: the arguments cannot be sent.
            trio.ClosedResourceError: the connection was closed by this side.
            MessageTooLong: the result is longer than the connection's ``max_message_size``.
        """
        request = _Request(method, arguments, buffers, metadata)
        idempotent = idempotent or method in self._idempotent
        call = self._repeat if self._hook is None else self._in_hook
        if timeout is None:
            return await call(request, idempotent)
        with trio.move_on_after(check_timeout(timeout, "timeout")):
            return await call(request, idempotent)
        raise CallTimedOut(f"{method}: no answer within {timeout:g} seconds", may_have_run=request.may_have_run)

    async def _in_hook(self, request: _Request, idempotent: bool) -> Any:
        assert self._hook is not None
        request.metadata = metadata = dict(request.metadata or {})
        with self._hook(request.method, metadata):
            return await self._repeat(request, idempotent)

    async def _repeat(self, request: _Request, idempotent: bool) -> Any:
        message: Any = request.message()
        tries = attempts = 0
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            self._slots.acquire_nowait()
        except trio.WouldBlock:
            await self._slots.acquire()
            message = None  # encoded again, because less time is left
        try:
            while True:
                used = self._connections.current
                if used is None or not used.usable:
                    used, message = await self._connections.next(), None
                try:
                    return await self._attempt(used, request, message or request.message())
                except CallLost as error:
                    attempts += error.may_have_run
                    if error.may_have_run and not (idempotent and attempts < _ATTEMPTS):
                        raise
                    tries += 1
                    if not await self._connections.replace(used, error, tries):
                        raise
                message = None
        except CallError as error:
            error.may_have_run |= request.may_have_run  # an earlier attempt may have run
            raise
        finally:
            self._slots.release()

    async def _attempt(self, used: ClientConnection, request: _Request, message: Any) -> Any:
        ran_before, kept, data = request.may_have_run, used.take_kept(), None
        if kept is not None:
            try:
                data = await _exchange(used, kept, request, message)
            except CallLost as error:
                if not (isinstance(error.__cause__, trio.EndOfChannel) and used.usable):
                    raise
                message = request.message()  # the server has left the conversation before it has read the call
        if data is None:
            data = await _exchange(used, used.open(), request, message)
        try:
            kind, value = self._answer(request.method, data)
        except CallError as error:
            request.may_have_run = ran_before or error.may_have_run
            raise
        except _DeadlinePassed:
            raise await _timed_out(request.method) from None
        if kind != wire.REPLY:
            raise CallError(f"{request.method}: the answer of the server is a message of kind {kind}")
        return value

    def _answer(self, method: str, data: bytes) -> tuple[int, Any]:
        """Returns the kind and the value of what the server has sent, or raises the error that it has sent."""
        try:
            codec, kind, head, buffers = decode_message(data)
            value = decode_head(codec, head)
        except wire.BadMessage as error:
            raise CallError(f"{method}: the answer of the server is {error}") from None
        if kind == wire.ERROR:
            raise self._error(method, value)
        return kind, whole(value, buffers)

    def _error(self, method: str, value: Any) -> Exception:
        """Returns the exception for an ERROR."""
        match value:
            case [wire.RAISED, str(name), str(text), str(trace), list() | None as arguments]:
                remote = RemoteError(bounded(name, 200), bounded(text), bounded(trace, wire.MOST_TRACEBACK))
                return self._mapped(remote, arguments or [])
            case [wire.DEADLINE, *_]:
                return _DeadlinePassed()
            case [int(category), _, str(text), *_] if category in _REFUSALS:
                return _REFUSALS[category](bounded(text))
        return CallError(f"{method}: the answer of the server is an error that cannot be read")

    def _mapped(self, error: RemoteError, arguments: list[Any]) -> Exception:
        kind = self._errors.get(error.type)
        if kind is None:
            return error
        try:
            mapped = kind(*arguments)
        except Exception:
            return error
        mapped.__cause__ = error
        return mapped

    def stream(
        self,
        method: str,
        /,
        *,
        buffers: Sequence[Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> Stream:
        """Returns an async context manager: a call in which either side sends many values. Entering it begins the call.

        Iterate over the :class:`Stream` for what an :func:`trio_ucx.rpc.stream` yields, and send with
        :meth:`Stream.send` what the handler reads with :meth:`Call.items`. The deadlines of the cancel scopes around
        the block travel. A stream is never repeated.

        Args:
            method, buffers, metadata, arguments: as for :meth:`call`.

        Cancellation: leaving the block before the end cancels the handler.

        Raises:
            TypeError, ValueError: the arguments cannot be sent; raised when the block is entered, as is ``CallLost``.
        """
        if RESERVED & arguments.keys():
            raise TypeError("stream has no timeout= (put trio.fail_after around its block), and no idempotent=")
        return Stream._create(self, _Request(method, arguments, buffers, metadata, wire.STREAM))


async def _exchange(used: ClientConnection, talk: Channel, request: _Request, message: Any) -> bytes:
    """Sends a call in a conversation, which it leaves or keeps, and returns what the server sends."""
    ran_before, keep = request.may_have_run, False
    try:
        await _send(talk, request, message)
        try:
            data = await talk.receive()
        except trio.EndOfChannel as error:
            request.may_have_run = ran_before
            raise request.lost(error, may_have_run=False) from error
        except trio.BrokenResourceError as error:
            raise request.lost(error, may_have_run=True) from error
        keep = wire.is_reply(data)
        return data
    finally:
        used.leave(talk, keep=keep)


async def _send(talk: Channel, request: _Request, message: Any) -> None:
    """Sends a call. Not a checkpoint if it is a small one."""
    try:
        sent = talk._begin_send(message)
    except trio.BrokenResourceError as error:
        raise request.lost(error, may_have_run=False) from error
    request.may_have_run = True
    if sent is not None:
        try:
            await completed(sent, talk.connection._link.engine)
        except PeerClosed:
            pass  # the answer says why, or the end does
        except trio.BrokenResourceError as error:
            raise request.lost(error, may_have_run=True) from error


async def _timed_out(method: str) -> CallTimedOut:
    """The server has cancelled the handler at the deadline, which comes here in a moment: then the caller is cancelled.

    The error is for a caller that has moved its deadline meanwhile.
    """
    ahead = trio.current_effective_deadline() - trio.current_time()
    await trio.sleep(min(max(ahead, 0.0) + 0.001, 1.0))
    return CallTimedOut(f"{method}: the deadline has passed at the server", may_have_run=True)


@attrs.define(eq=False)
class Stream(metaclass=OpenedNotConstructed):
    """A call with many values: see :meth:`Client.stream`.

    Iterating over it yields what the handler yields; an item with buffers is a :class:`Reply`. What the handler raises
    is raised there.

    Cancellation: a cancelled step loses no item. Leaving the block before the end cancels the handler.
    """

    _client: Client
    _request: _Request
    _stack: ExitStack = attrs.field(factory=ExitStack, init=False)
    _used: ClientConnection | None = attrs.field(default=None, init=False)
    _talk: Channel | None = attrs.field(default=None, init=False)
    _flow: ItemFlow | None = attrs.field(default=None, init=False)
    _sent_all: bool = attrs.field(default=False, init=False)
    _ended: bool = attrs.field(default=False, init=False)
    _result: Any = attrs.field(default=None, init=False)

    @enable_ki_protection
    async def __aenter__(self) -> Stream:
        if self._talk is not None:
            raise RuntimeError("a stream can be entered once; call stream() again for another one")
        client, request = self._client, self._request
        request.message()  # raises if it cannot be encoded
        await client._slots.acquire()
        with ExitStack() as stack:
            stack.callback(client._slots.release)
            if client._hook is not None:
                request.metadata = metadata = dict(request.metadata or {})
                stack.enter_context(client._hook(request.method, metadata))
            used = client._connections.current
            if used is None or not used.usable:
                used = await client._connections.next()
            talk = used.open()
            try:
                await _send(talk, request, request.message())
            except BaseException:
                used.leave(talk)
                raise
            self._used, self._talk, self._flow = used, talk, ItemFlow(talk, DEFAULT)
            self._stack = stack.pop_all()
        return self

    @enable_ki_protection
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._used is not None and self._talk is not None
        used, self._used = self._used, None
        try:
            used.leave(self._talk, over=self._ended)
        finally:
            absorbed = self._stack.__exit__(exc_type, exc, traceback)
        if exc is None:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
        return absorbed

    def __del__(self) -> None:
        used, talk, stack = self._used, self._talk, self._stack
        if used is None or talk is None:
            return

        def leave() -> None:
            contained(used.leave, talk)
            contained(stack.__exit__, GeneratorExit, GeneratorExit(), None)

        run = used.connection._link.engine.run
        if not run.inherited:
            warn_resource(dropped("trio_ucx.rpc.Client.stream"), self)
            run.call_soon(leave, always=True)

    def __aiter__(self) -> Stream:
        return self

    @enable_ki_protection
    async def __anext__(self) -> Any:
        flow, method = self._opened(), self._request.method
        if self._ended:
            await trio.lowlevel.checkpoint()
            raise StopAsyncIteration
        try:
            kind, value = await flow.next()
        except trio.EndOfChannel as error:
            raise self._request.lost(error, may_have_run=False) from error
        except trio.BrokenResourceError as error:
            raise self._request.lost(error, may_have_run=True) from error
        except wire.BadMessage as error:
            raise CallError(f"{method}: the server has sent {error}") from None
        if kind == wire.ITEM:
            return value
        self._ended = True
        if kind == wire.ERROR:
            problem = self._client._error(method, value)
            raise await _timed_out(method) if isinstance(problem, _DeadlinePassed) else problem
        self._result = value
        raise StopAsyncIteration

    @enable_ki_protection
    async def send(self, value: Any, *, buffers: Sequence[Any] | None = None) -> None:
        """Sends an item to the handler, which gets it from :meth:`Call.items`.

        Waits while the handler has eight items unread.

        Args:
            value: anything that can be encoded.
            buffers: what to send beside it; the handler then gets a :class:`Reply`.

        Cancellation: the item may or may not arrive.

        Raises:
            PeerClosed: the handler has ended. :meth:`result`, or iterating, says how.
            trio.BrokenResourceError: the connection has ended.
            trio.ClosedResourceError: the block was left, or :meth:`send_eof` called.
            TypeError, ValueError: the item cannot be sent.
        """
        flow = self._opened()
        if self._sent_all:
            raise trio.ClosedResourceError("send_eof was called on this stream")
        try:
            await flow.send(value, buffers)
        except trio.EndOfChannel:
            raise PeerClosed("the handler has ended") from None
        except wire.BadMessage as error:
            raise CallError(f"{self._request.method}: the server has sent {error}") from None

    @enable_ki_protection
    async def send_eof(self) -> None:
        """Says that no more items come: the handler's :meth:`Call.items` ends. Called before: no effect.

        Cancellation: it may or may not have been said; call again.

        Raises: as :meth:`send`.
        """
        self._opened()
        if self._sent_all or self._talk is None:
            await trio.lowlevel.checkpoint()
            return
        await self._talk.send(encode_message(DEFAULT, wire.END, None))
        self._sent_all = True

    @enable_ki_protection
    async def result(self) -> Any:
        """Says that no more items come, and returns what the method returns. Items that it yields are dropped.

        Cancellation: no result is lost; call again.

        Raises: as :meth:`Client.call`.
        """
        try:
            await self.send_eof()
        except PeerClosed:
            pass
        async for _ in self:
            pass
        return self._result

    def _opened(self) -> ItemFlow:
        if self._flow is None:
            raise RuntimeError("enter the stream with `async with` first")
        return self._flow
