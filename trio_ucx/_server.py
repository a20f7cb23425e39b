"""The Server that ``serve_ucx`` runs: its handlers, what ends them, and how it drains."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, overload

import attrs
import trio
from trio.lowlevel import disable_ki_protection, enable_ki_protection

from ._connection import Connection
from ._errors import PeerClosed
from ._listener import Listener
from ._opening.addresses import reachable_address
from ._report.frames import innermost_place
from ._report.items import counted
from ._statistics import REFUSAL_REASONS, ServerStatistics, Totals
from ._util.arguments import check_timeout
from ._util.handles import OpenedNotConstructed
from ._util.limited_log import LimitedLog
from .ucp._internal_api import addresses_of_devices, separate

logger = logging.getLogger("trio_ucx")

#: What to do with an exception of a handler: let it end the server, log it, or call a function with it.
OnHandlerError = Literal["raise", "log"] | Callable[[Connection, Exception], object]
Handler = Callable[[Connection], Awaitable[object]]
#: They say that the client has closed gracefully. Its library may still wait for our ACK, so we close gracefully, too.
_IN_ORDER = (trio.EndOfChannel, PeerClosed)


@attrs.define(eq=False, repr=False)
class Server(Sequence[Listener], metaclass=OpenedNotConstructed):
    """A running :func:`serve_ucx`: ``await nursery.start(serve_ucx, handler, port)`` returns it.

    As a sequence, it has its listeners.
    """

    _listeners: tuple[Listener, ...]
    _handler: Handler
    _on_error: OnHandlerError
    #: The connections whose handlers run, and those that close because theirs have ended; what cancels each.
    _handlers: dict[Connection, trio.CancelScope] = attrs.field(factory=dict, init=False)
    _closing: dict[Connection, trio.CancelScope] = attrs.field(factory=dict, init=False)
    #: The tasks of both, and the connections whose handlers have called ``drain``.
    _tasks: dict[trio.lowlevel.Task, Connection] = attrs.field(factory=dict, init=False)
    _drainers: set[Connection] = attrs.field(factory=set, init=False)
    _draining: bool = attrs.field(default=False, init=False)
    #: When handlers and closes are cancelled: a drain that was not cancelled sets it.
    _deadline: float = attrs.field(default=math.inf, init=False)
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    #: Listeners that accept, and handlers that run.
    _running: int = attrs.field(default=0, init=False)
    _totals: Totals = attrs.field(factory=Totals, init=False)
    _drains: int = attrs.field(default=0, init=False)
    _cancelled: int = attrs.field(default=0, init=False)
    _log: LimitedLog = attrs.field(factory=LimitedLog, init=False)
    #: Waits for signals; cancelled when nothing runs any more.
    _signals: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """Its listeners, one for each address of the host."""
        return self._listeners

    @property
    def address(self) -> tuple[str, int]:
        """Its address for :func:`connect`, here and on other machines.

        If it listens at all addresses of this machine, an address of a device that UCX uses.
        """
        own = addresses_of_devices(self._listeners[0]._acceptor.engine.identity.address)
        return reachable_address([listener.address for listener in self._listeners], own)

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The connections whose handlers run."""
        return tuple(self._handlers)

    def statistics(self) -> ServerStatistics:
        """Returns sums over its connections, ended ones included, and how many clients are in which state.

        Any thread may call it.

        Raises: nothing, also after its end.
        """
        acceptors = [listener._acceptor for listener in self._listeners]
        return ServerStatistics(
            connections=self._totals.read(),
            handlers=len(self._handlers),
            handshaking=sum(acceptor.handshaking for acceptor in acceptors),
            waiting=sum(acceptor.waiting for acceptor in acceptors),
            refused={reason: sum(acceptor.refused[reason] for acceptor in acceptors) for reason in REFUSAL_REASONS},
            drains=self._drains,
            handlers_cancelled=self._cancelled,
        )

    @overload
    def __getitem__(self, index: int) -> Listener: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Listener]: ...
    def __getitem__(self, index: int | slice) -> Listener | Sequence[Listener]:
        return self._listeners[index]

    def __len__(self) -> int:
        return len(self._listeners)

    def __repr__(self) -> str:
        state = "draining" if self._draining else "serving"
        return f"<trio_ucx.Server at {self.address}, {state} {len(self._handlers)} connections>"

    # ---- draining ----

    @enable_ki_protection
    async def drain(self, timeout: float = math.inf) -> int:
        """Shuts the server down: handlers finish the requests that have arrived, unless ``timeout`` passes.

        New clients are refused: their :func:`connect` raises :class:`ServerDraining`. Handlers get what has arrived;
        then their receives end as if the client had closed: ``trio.EndOfChannel``, the end of ``messages()``, ``b""``.
        So a handler that waits for the next request ends, and one that works finishes and answers. Conversations that
        are open go on until they end. When all handlers have ended, the listeners are closed. :func:`serve_ucx` returns
        when the connections are closed, too: it waits for the clients, one of which may be busy.

        Args:
            timeout: seconds after which the handlers that still run are cancelled, and all connections closed by force,
                those that this call no longer waits for included.

        Returns:
            How many handlers this call has cancelled.

        A handler, or an rpc method, may call it: it neither waits for that handler nor cancels it, and returns when all
        others have ended. Nor does it for other handlers that have called it; a call from elsewhere does for all.

        Cancellation: the server goes on draining, without a timeout; call again.

        Raises:
            TypeError, ValueError: a wrong timeout.
        """
        deadline = trio.current_time() + check_timeout(timeout, "timeout")
        await trio.lowlevel.checkpoint_if_cancelled()
        self._draining = True
        self._drains += 1
        for listener in self._listeners:
            listener._acceptor.drain()
        for connection in list(self._handlers):
            connection._link.receiving.drain()
        spared: Set[Connection] = set()
        if (caller := self._handler_of_this_task()) is not None:
            self._drainers.add(caller)
            spared = self._drainers
            self._changed.unpark_all()
        with trio.move_on_at(deadline):
            await self._wait_until(lambda: self._drained(spared))
        self._deadline = min(self._deadline, deadline)
        self._close_listeners()
        left = self._handlers.keys() - spared
        for scope in (*(self._handlers[one] for one in left), *self._closing.values()):
            scope.deadline = self._deadline
        if left:
            await self._wait_until(lambda: self._handlers.keys() | self._closing.keys() <= spared)
        await trio.lowlevel.checkpoint()
        return len(left)

    def _handler_of_this_task(self) -> Connection | None:
        """Returns the connection whose handler cannot end before the current task has ended, if there is one.

        By nurseries, not by a context variable: a task in the nursery of another one does not hold the handler up.
        """
        task: trio.lowlevel.Task | None = trio.lowlevel.current_task()
        while task is not None and task not in self._tasks:
            task = None if task.parent_nursery is None else task.parent_nursery.parent_task
        return None if task is None else self._tasks[task]

    def _drained(self, spared: Set[Connection] = frozenset()) -> bool:
        settled = all(listener._acceptor.settled for listener in self._listeners)
        return settled and self._handlers.keys() <= spared

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener._close()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.park()

    async def _drain_on_signals(self, timeout: float) -> None:
        """The first signal drains the server; a second one cancels what is left."""
        arrived = trio.Event()
        with _receiving_signals(lambda: arrived.set()):
            with self._signals:
                await arrived.wait()
            if self._signals.cancelled_caught:
                return
            logger.info("%r: a signal arrived; draining for at most %g seconds", self, timeout)
            arrived = trio.Event()
            second = trio.CancelScope()

            async def drain(seconds: float, late: str) -> None:
                cancelled = await self.drain(seconds)
                if cancelled:
                    handlers = counted(cancelled, "handler")
                    logger.warning("the server at %s: %s did not end %s: cancelled", self.address, handlers, late)

            async def cancel_with_second() -> None:
                with second:
                    await arrived.wait()
                if not second.cancelled_caught:
                    await drain(0.0, "before a second signal")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_with_second)
                await drain(timeout, f"within {timeout:g} seconds")
                await self._wait_until(lambda: not self._closing)
                second.cancel()

    # ---- serving ----

    def _start(self, nursery: trio.Nursery, handlers: trio.Nursery, drain_on_signal: float | None) -> None:
        servers.add(self)
        for listener in self._listeners:
            listener._acceptor.on_settled = self._changed.unpark_all
            self._running += 1
            nursery.start_soon(self._accept, listener, handlers)
        if drain_on_signal is not None:
            nursery.start_soon(self._drain_on_signals, drain_on_signal)

    @enable_ki_protection
    async def _accept(self, listener: Listener, handlers: trio.Nursery) -> None:
        try:
            async with listener:
                while True:
                    self._begin(await listener.accept(), handlers)
        except trio.ClosedResourceError:
            pass  # it was closed: the server takes no more clients there, and finishes what it has
        finally:
            self._ended()

    def _begin(self, connection: Connection, handlers: trio.Nursery) -> None:
        self._running += 1
        self._totals.add(connection._link)
        self._handlers[connection] = trio.CancelScope(deadline=self._deadline)
        if self._draining:
            connection._link.receiving.drain()
        try:
            handlers.start_soon(self._serve, connection, name=self._handler)
        except BaseException:  # the user's nursery has ended
            self._forget(connection)
            connection.abort()
            raise
        self._changed.unpark_all()

    @enable_ki_protection
    async def _serve(self, connection: Connection) -> None:
        task = trio.lowlevel.current_task()
        self._tasks[task] = connection
        try:
            with self._handlers[connection] as scope:
                await self._handle(connection)
            if scope.cancelled_caught:
                self._cancelled += connection in self._handlers
                connection.abort()  # it may be closing in the background
        finally:
            del self._tasks[task]
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self._handlers.pop(connection, None)
        self._closing.pop(connection, None)
        self._drainers.discard(connection)
        self._ended()

    def _ended(self) -> None:
        """A listener has ended, or a handler, whose connection is closed."""
        self._running -= 1
        if not self._running:
            servers.discard(self)
            self._signals.cancel()
        self._look()

    def _look(self) -> None:
        """Something has ended."""
        if self._draining and self._drained():
            self._close_listeners()
        self._changed.unpark_all()

    async def _handle(self, connection: Connection) -> None:
        own: BaseException | None = None
        rest: BaseException | None = None
        try:
            await _run_handler(self._handler, connection)
        except BaseException as error:
            own, rest = split_own(connection, error)
            if own is not None:
                self._log_end(connection, own, innermost_place(own) or innermost_place(error))
            if rest is not None or not isinstance(own, _IN_ORDER):
                connection.abort()
            if own is None and not self._takes(connection, error):
                raise
        if rest is not None and own is not None and not self._takes(connection, rest):
            raise rest  # outside the except block, or the removed errors would be its context
        self._closing[connection] = self._handlers.pop(connection)
        self._look()
        try:
            await connection.aclose()
        except trio.BrokenResourceError as error:
            self._log_end(connection, error, None, "had returned, and the connection was being closed")

    def _log_end(self, connection: Connection, error: BaseException, place: str | None, how: str = "ended") -> None:
        """Logs that a handler has ended because of its client.

        Args:
            error: of its connection. Its notes say what else has ended.
            place: where the handler stood, if the program's code was running.
        """
        end = " ".join([f"{how} at {place}" if place else how, *getattr(error, "__notes__", ())])
        line = f"{connection!r}: {error}. The handler {name_of(self._handler)} {end}"
        if isinstance(error, _IN_ORDER) or connection._link.life.peer_closes:
            logger.debug("%s", line)
        else:
            _, _, received, _ = connection._link.traffic()
            reason = connection._link.life.reason
            gave_up = not received and reason not in ("ended", "vanished")  # its connect, perhaps
            level = logging.INFO if gave_up else logging.WARNING
            self._log.log((type(error), reason, place, how, level), level, line)

    def _takes(self, connection: Connection, error: BaseException) -> bool:
        """True if ``on_handler_error`` takes a handler's exception, which then does not end the server."""
        if self._on_error == "raise" or not isinstance(error, Exception):
            return False
        if self._on_error == "log":
            logger.error("%r: the handler %s failed", connection, name_of(self._handler), exc_info=error)
        else:
            _call_user(self._on_error, connection, error)
        return True


#: The servers that serve, in all threads. Iterate over a copy: other threads change it.
servers: set[Server] = set()


# ---- the user's code: KeyboardInterrupt may be raised anywhere in it ----


@disable_ki_protection
async def _run_handler(handler: Handler, connection: Connection) -> None:
    await handler(connection)


@disable_ki_protection
def _call_user(function: Callable[[Connection, Exception], object], connection: Connection, error: Exception) -> None:
    function(connection, error)


# ---- why a handler has ended ----


def split_own(connection: Connection, error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Separates the errors that a connection raised because of its own client from all others.

    Returns:
        The first of these errors, and ``error`` without them; each is None if there is none.
    """
    share = connection._link.share
    if share.engine.broken is not None:
        return None, error  # the worker broke, not the connection
    return separate(error, share.ending.origin)


def name_of(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


# ---- signals ----

#: What the signals SIGTERM and SIGINT do while servers wait for them. (``trio.open_signal_receiver`` gives each signal
#: to one receiver only, and a program may have several servers.)
_receivers: dict[object, Callable[[], None]] = {}
_DRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: What they did before.
_previous: dict[signal.Signals, Any] = {}


def _signal_arrived(number: int, frame: FrameType | None) -> None:
    for receive in list(_receivers.values()):
        receive()


@contextmanager
def _receiving_signals(receive: Callable[[], None]) -> Iterator[None]:
    """Calls a function in Trio's run with each SIGTERM or SIGINT. Only in the main thread."""
    token, key = trio.lowlevel.current_trio_token(), object()
    if not _receivers:
        _previous.update({each: signal.signal(each, _signal_arrived) for each in _DRAIN_SIGNALS})
    _receivers[key] = lambda: token.run_sync_soon(receive)
    try:
        yield
    finally:
        del _receivers[key]
        if not _receivers:
            for each in _DRAIN_SIGNALS:
                signal.signal(each, _previous[each])
