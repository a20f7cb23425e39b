"""Opening connections and listeners, and serving."""

from __future__ import annotations

import errno
import logging
import math
import socket
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ._connection import Connection
from ._handshake import Connecting, Services
from ._link import Link
from ._listener import Listener, Reception
from ._session import Options
from ._shared import shared_worker
from .ucp import Worker, WorkerAddress
from .ucp._address import Resolved, SocketAddress, resolve, split_address
from .ucp._listener import check_port, wrong_family
from .ucp._opening import EndpointOptions, check_local_address, check_source
from .ucp._util import check_integer, check_timeout

logger = logging.getLogger("trio_ucx")

#: Where a connection can go.
Address = SocketAddress | WorkerAddress

#: A window smaller than this would hold hardly a message.
MINIMUM_WINDOW = 4096
DEFAULT_BACKLOG = 1024
#: Trio's.
HAPPY_EYEBALLS_DELAY = 0.25


def make_options(close_timeout: float, window: int, max_message_size: int) -> Options:
    return Options(
        close_timeout=check_timeout(close_timeout, "close_timeout"),
        window=check_integer(window, "window", MINIMUM_WINDOW, 2**62),
        max_message_size=check_integer(max_message_size, "max_message_size", 0, 2**62),
    )


def check_worker(worker: Worker | None) -> Worker | None:
    if worker is not None:
        if not isinstance(worker, Worker):
            raise TypeError(f"worker must be a trio_ucx.ucp.Worker, not {type(worker).__name__}")
        worker._engine.check()
    return worker


@attrs.frozen
class _Way:
    """How to get to a listener.

    Attributes:
        timeout: seconds for everything.
        delay: see ``happy_eyeballs_delay``.
        local: the address of ours to connect from.
    """

    worker: Worker | None
    timeout: float
    delay: float
    local: Resolved | None

    @classmethod
    def check(
        cls,
        address: Address,
        worker: Worker | None,
        connect_timeout: float,
        happy_eyeballs_delay: float | None,
        local_address: str | None,
    ) -> _Way:
        if isinstance(address, WorkerAddress) and local_address is not None:
            raise ValueError("local_address= is for connections to a host and port, not to a worker address")
        return cls(
            check_worker(worker),
            check_timeout(connect_timeout, "connect_timeout"),
            math.inf if happy_eyeballs_delay is None else check_timeout(happy_eyeballs_delay, "happy_eyeballs_delay"),
            check_local_address(local_address),
        )


async def _open(address: Address, way: _Way, options: Options) -> Connection:
    await trio.lowlevel.checkpoint()
    if isinstance(address, WorkerAddress):
        target = way.worker or shared_worker()
        services, ours = Services.of(target), target.address.ucx
        connecting = Connecting(services, target._connect_worker(address), options)
        link = await connecting.run(way.timeout, service=address.service, address=ours)
        return Connection._wrap(link)
    return await _open_by_name(*split_address(address), way, options)


async def _open_by_name(host: str, port: int, way: _Way, options: Options) -> Connection:
    """Tries the addresses of a host name, each ``delay`` seconds after the one before, or when that failed."""
    deadline = trio.current_time() + way.timeout
    addresses: list[Resolved] | None = None
    with trio.move_on_at(deadline):
        addresses = await resolve(host, port)
    if addresses is None:
        raise TimeoutError(errno.ETIMEDOUT, f"looking up {host!r} took longer than {way.timeout} seconds")
    attempts: list[tuple[Worker, Resolved]] = []
    errors: list[Exception] = []
    for address in _families_alternating(addresses):
        if way.local is not None:
            try:
                check_source(way.local, address)
            except OSError as mismatch:
                errors.append(mismatch)
                continue
        target = way.worker or shared_worker(address.family)
        if address.family == target.context.family:
            attempts.append((target, address))
        else:
            errors.append(wrong_family(address, target._engine))
    if len(attempts) == 1 and not errors:
        return Connection._wrap(await _attempt(*attempts[0], way, options, deadline))
    links = await _race(attempts, way, options, deadline, errors)
    for link in links[1:]:
        link.abort()
    if links:
        return Connection._wrap(links[0])
    for error in errors:
        if not isinstance(error, OSError) or len(errors) == 1:
            raise error
    if errors and all(isinstance(error, TimeoutError) for error in errors):
        raise errors[-1]
    raise OSError(
        getattr(errors[0], "errno", None) or errno.EHOSTUNREACH if errors else errno.EHOSTUNREACH,
        f"all attempts to connect to {host} port {port} failed: " + "; ".join(map(str, errors)),
    ) from ExceptionGroup("the attempts", errors or [OSError(f"{host} has no address")])


def _families_alternating(addresses: list[Resolved]) -> list[Resolved]:
    """The best address of the other family comes second (RFC 6555, 5.4): what fails is usually a whole family."""
    others = [address for address in addresses if address.family != addresses[0].family]
    if not others:
        return addresses
    return [addresses[0], others[0], *(address for address in addresses[1:] if address is not others[0])]


async def _attempt(target: Worker, address: Resolved, way: _Way, options: Options, deadline: float) -> Link:
    core = target._connect_socket(address, EndpointOptions(local=way.local))
    connecting = Connecting(Services.of(target), core, options)
    return await connecting.run(max(0.0, deadline - trio.current_time()))


async def _race(
    attempts: list[tuple[Worker, Resolved]], way: _Way, options: Options, deadline: float, errors: list[Exception]
) -> list[Link]:
    """The connections that came about, the first first; more than one only if they came at the same time."""
    links: list[Link] = []

    @enable_ki_protection
    async def run(target: Worker, address: Resolved, failed: trio.Event) -> None:
        try:
            links.append(await _attempt(target, address, way, options, deadline))
        except Exception as error:
            errors.append(error)
            failed.set()
        else:
            nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            for target, address in attempts:
                failed = trio.Event()
                nursery.start_soon(run, target, address, failed)
                with trio.move_on_after(way.delay):
                    await failed.wait()
    except BaseException:
        for link in links:
            link.abort()
        raise
    return links


class _Connect:
    """What :func:`connect` returns. A class, because a KeyboardInterrupt can end a generator between its lines."""

    def __init__(self, open: Callable[[], Awaitable[Connection]]) -> None:
        self._open = open
        self._connection: Connection | None = None

    @enable_ki_protection
    async def __aenter__(self) -> Connection:
        if self._connection is not None:
            raise RuntimeError("connect(...) can be entered once; call connect again for another connection")
        self._connection = await self._open()
        return self._connection

    @enable_ki_protection
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._connection is not None
        await self._connection.__aexit__(exc_type, exc, traceback)


def connect(
    address: Address,
    *,
    worker: Worker | None = None,
    connect_timeout: float = 10,
    close_timeout: float = 10,
    window: int = 2**20,
    max_message_size: int = 2**30,
    happy_eyeballs_delay: float | None = HAPPY_EYEBALLS_DELAY,
    local_address: str | None = None,
) -> _Connect:
    """Connects to a trio_ucx listener; an async context manager that gives a :class:`Connection`.

    Leaving the block normally closes gracefully (:meth:`Connection.aclose`), leaving it by an exception or a
    cancellation closes by force.

    Args:
        address: ``"host:port"``, ``"[v6]:port"``, ``(host, port)``, or a listener's ``worker_address``.
        worker: where the connection shall live; by default the run's shared worker.
        connect_timeout: seconds for the look-up of the name, the connection and the handshake together.
        close_timeout: seconds that closing may take.
        window: bytes that we hold unread at most, before the peer's sends wait.
        max_message_size: the longest message that :meth:`Connection.receive` allocates memory for.
        happy_eyeballs_delay: when a name has several addresses, seconds after which the next is tried besides; the
            first that answers is taken. None waits until the one before has failed.
        local_address: the numeric address of ours to connect from, which the server sees: one that a network
            interface has. It is for the socket by which the two find each other; on which devices the messages then
            go UCX chooses, and its option NET_DEVICES restricts.

    Cancellation: of entering: no connection is left behind.

    Raises:
        TimeoutError: nobody answered within ``connect_timeout``.
        OSError: refused, unreachable, an unknown host; ``errno`` says which.
        TypeError, ValueError: a wrong argument.
    """
    if not isinstance(address, WorkerAddress):
        address = split_address(address)
    way = _Way.check(address, worker, connect_timeout, happy_eyeballs_delay, local_address)
    options = make_options(close_timeout, window, max_message_size)
    return _Connect(lambda: _open(address, way, options))


@enable_ki_protection
async def open_ucx_stream(
    host: str,
    port: int,
    *,
    worker: Worker | None = None,
    connect_timeout: float = 10,
    close_timeout: float = 10,
    window: int = 2**20,
    max_message_size: int = 2**30,
    happy_eyeballs_delay: float | None = HAPPY_EYEBALLS_DELAY,
    local_address: str | None = None,
) -> Connection:
    """Connects to a trio_ucx listener, as ``trio.open_tcp_stream`` does over TCP; close the result.

    Arguments, cancellation and errors are :func:`connect`'s.
    """
    address = split_address((host, port))
    way = _Way.check(address, worker, connect_timeout, happy_eyeballs_delay, local_address)
    return await _open(address, way, make_options(close_timeout, window, max_message_size))


@enable_ki_protection
async def open_ucx_listeners(
    port: int,
    *,
    host: str | None = None,
    worker: Worker | None = None,
    backlog: int | None = None,
    connect_timeout: float = 10,
    close_timeout: float = 10,
    window: int = 2**20,
    max_message_size: int = 2**30,
) -> list[Listener]:
    """Opens a listener for each address of a host.

    Args:
        port: 0 chooses a free one.
        host: a name or address of this machine; None is every IPv4 interface. (UCX uses one address family per worker:
            for IPv6 say ``"::"``.)
        worker: where the listener and its connections shall live; by default the run's shared worker.
        backlog: clients that may be shaking hands or waiting to be accepted; more are turned away. None is 1024.
        connect_timeout: seconds that a client has for its hello.
        close_timeout, window, max_message_size: of the connections, see :func:`connect`.

    Raises:
        OSError: the address is in use, or not ours.
        TypeError, ValueError: a wrong argument.
    """
    port = check_port(port)
    check_worker(worker)
    backlog = check_integer(DEFAULT_BACKLOG if backlog is None else backlog, "backlog", 1, 2**31)
    connect_timeout = check_timeout(connect_timeout, "connect_timeout")
    options = make_options(close_timeout, window, max_message_size)
    if host is not None and not isinstance(host, str):
        raise TypeError(f"the host must be a str or None, not {type(host).__name__}")
    await trio.lowlevel.checkpoint()
    if host is None:
        family = worker.context.family if worker is not None else socket.AF_INET
        addresses = [Resolved(family, "::" if family == socket.AF_INET6 else "0.0.0.0", port)]
    else:
        addresses = await resolve(host, port)
    listeners: list[Listener] = []
    refused: list[Exception] = []
    try:
        for address in addresses:
            target = worker or shared_worker(address.family)
            if address.family != target.context.family:
                refused.append(wrong_family(address, target._engine))
                continue
            if port == 0 and listeners:
                address = attrs.evolve(address, port=listeners[0].address[1])
            listeners.append(Listener._create(Reception(target, address, options, connect_timeout, backlog)))
    except BaseException:
        for listener in listeners:
            listener._reception.close()
        raise
    if not listeners:
        raise refused[0] if refused else OSError(errno.EADDRNOTAVAIL, f"{host!r} has no address to listen at")
    return listeners


@enable_ki_protection
async def serve_ucx(
    handler: Callable[[Connection], Awaitable[object]],
    port: int,
    *,
    host: str | None = None,
    worker: Worker | None = None,
    handler_nursery: trio.Nursery | None = None,
    task_status: trio.TaskStatus[list[Listener]] = trio.TASK_STATUS_IGNORED,
    **options: Any,
) -> None:
    """Listens, and runs ``handler(connection)`` in a task for each client, as ``trio.serve_tcp`` does over TCP.

    A handler that returns has its connection closed gracefully, one that raises by force; an exception that a handler
    does not catch ends the server, as in Trio.

    Args:
        handler: an async function that takes a :class:`Connection`.
        port, host, worker: see :func:`open_ucx_listeners`, which also takes the ``options``.
        handler_nursery: where the handlers run; by default a nursery of its own.
        task_status: ``await nursery.start(serve_ucx, handler, 0)`` returns the listeners once they listen.

    Cancellation: closes the listeners and cancels the handlers.
    """
    listeners = await open_ucx_listeners(port, host=host, worker=worker, **options)

    async def handle(connection: Connection) -> None:
        try:
            await handler(connection)
        except BaseException:
            connection.abort()
            raise
        try:
            await connection.aclose()
        except trio.BrokenResourceError as error:
            logger.info("%r: %s", connection, error)  # one client's loss is no reason to end the server

    await trio.serve_listeners(handle, listeners, handler_nursery=handler_nursery, task_status=task_status)
