"""Opening connections and listeners, and serving."""

from __future__ import annotations

import errno
import logging
import math
import ssl
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Literal

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ._connection import Connection
from ._handshake.client import Connecting, Entry
from ._handshake.facts import SharedMemory
from ._handshake.registry import Registry
from ._handshake.server import Acceptor
from ._link import Options
from ._listener import Listener
from ._shared import shared_worker
from ._unix import open_unix_listener, unix_path
from ._wire import MAX_WINDOW, MIN_WINDOW
from .ucp import Worker
from .ucp import _descriptors as descriptors
from .ucp._address import Resolved, SocketAddress, format_address, split_address
from .ucp._listener import check_port
from .ucp._opening import check_is_ours, check_local_address
from .ucp._status import origin_of
from .ucp._util import check_integer, check_timeout

logger = logging.getLogger("trio_ucx")

#: Where a connection can go: ``"host:port"``, ``"[v6]:port"``, ``(host, port)`` or ``"unix:/path"``.
Address = SocketAddress

DEFAULT_BACKLOG = 1024
#: Trio's.
HAPPY_EYEBALLS_DELAY = 0.25
#: Seconds of silence after which the kernel asks whether the peer's host is still there.
KEEPALIVE_INTERVAL = 20.0


def make_options(close_timeout: float, window: int, max_message_size: int) -> Options:
    return Options(
        close_timeout=check_timeout(close_timeout, "close_timeout"),
        window=check_integer(window, "window", MIN_WINDOW, MAX_WINDOW),
        max_message_size=check_integer(max_message_size, "max_message_size", 0, 2**62),
    )


def make_entry(
    shared_memory: Literal["auto"] | bool,
    keepalive_interval: float,
    authkey: bytes | None,
    ssl_context: ssl.SSLContext | None,
    server_hostname: str | None = None,
) -> Entry:
    wishes = {"auto": SharedMemory.AUTO, True: SharedMemory.ALWAYS, False: SharedMemory.NEVER}
    if not isinstance(shared_memory, (str, bool)) or shared_memory not in wishes:
        raise ValueError(f"shared_memory must be 'auto', True or False, not {shared_memory!r}")
    if authkey is not None:
        if not isinstance(authkey, (bytes, bytearray)):
            raise TypeError(f"authkey must be bytes, not {type(authkey).__name__}")
        if not authkey:
            raise ValueError("authkey must not be empty: it is the secret that both sides know")
        authkey = bytes(authkey)
    if ssl_context is not None and not isinstance(ssl_context, ssl.SSLContext):
        raise TypeError(f"ssl_context must be an ssl.SSLContext, not {type(ssl_context).__name__}")
    if server_hostname is not None and not isinstance(server_hostname, str):
        raise TypeError(f"server_hostname must be a str, not {type(server_hostname).__name__}")
    interval = check_timeout(keepalive_interval, "keepalive_interval")
    return Entry(wishes[shared_memory], interval, authkey, ssl_context, server_hostname)


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
        target: a host and port, or the path of a Unix socket.
        timeout: seconds for everything.
    """

    target: tuple[str, int] | str
    worker: Worker | None
    timeout: float
    delay: float | None
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
        path = unix_path(address)
        local = check_local_address(local_address)
        if local is not None and path is not None:
            raise ValueError("local_address= is for connections to a host and port, not to a Unix socket")
        if happy_eyeballs_delay is not None:
            happy_eyeballs_delay = check_timeout(happy_eyeballs_delay, "happy_eyeballs_delay")
        return cls(
            split_address(address, other="'unix:/path'") if path is None else path,
            check_worker(worker),
            check_timeout(connect_timeout, "connect_timeout"),
            happy_eyeballs_delay,
            local,
        )

    @property
    def label(self) -> str:
        return f"unix:{self.target}" if isinstance(self.target, str) else format_address(self.target)

    async def open_socket(self) -> trio.SocketStream:
        """Connects the control socket, by ``trio.open_tcp_stream`` or ``trio.open_unix_socket``.

        Raises:
            OSError: always with an errno. (When all attempts failed, Trio's own error has none.)
        """
        try:
            if isinstance(self.target, str):
                return await trio.open_unix_socket(self.target)
            host, port = self.target
            local = None
            if self.local is not None:
                check_is_ours(self.local)  # Trio would say that it is incompatible with the remote address
                local = self.local.ip
            # Trio's documentation says that None is one attempt at a time, but its code takes it for the default.
            delay = math.inf if self.delay is None else self.delay
            return await trio.open_tcp_stream(host, port, happy_eyeballs_delay=delay, local_address=local)
        except OSError as error:
            if error.errno is not None:
                error.strerror = f"connecting to {self.label}: {error.strerror}"
                raise
            raise _with_errno(error) from error.__cause__


def _with_errno(error: OSError) -> OSError:
    """What Trio raises when all attempts failed, with the errno of the first one, and the words of each."""
    cause = error.__cause__
    causes = [each for each in (cause.exceptions if isinstance(cause, BaseExceptionGroup) else [cause]) if each]
    numbers = [each.errno for each in causes if isinstance(each, OSError) and each.errno is not None]
    # Trio gives no number where local_address= is of another family than every address of the host.
    number = numbers[0] if numbers else errno.EAFNOSUPPORT
    words = "; ".join(dict.fromkeys(map(str, causes)))
    return OSError(number, f"{error}: {words}")


async def _open(way: _Way, entry: Entry, options: Options) -> Connection:
    await trio.lowlevel.checkpoint()
    descriptors.require(descriptors.CONNECTION, f"connecting to {way.label}")
    registry = Registry.of(way.worker or shared_worker())
    if entry.ssl_context is not None and entry.server_hostname is None and not isinstance(way.target, str):
        entry = attrs.evolve(entry, server_hostname=way.target[0])
    if entry.ssl_context is not None and entry.ssl_context.check_hostname and entry.server_hostname is None:
        # The ssl module would check no name.
        raise ValueError(
            "server_hostname= is missing: say whom the certificate of the listener at a Unix socket must name, or use "
            "an ssl_context with check_hostname=False"
        )
    connecting = Connecting(registry, way.open_socket, way.label, entry, options, way.timeout)
    return Connection._wrap(await connecting.run())


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
    shared_memory: Literal["auto"] | bool = "auto",
    keepalive_interval: float = KEEPALIVE_INTERVAL,
    authkey: bytes | None = None,
    ssl_context: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
) -> _Connect:
    """Connects to a trio_ucx listener; an async context manager that gives a :class:`Connection`.

    The two sides meet on a socket (TCP, or a Unix socket), the *control socket*. There they authenticate each other if
    asked to, and exchange how their UCX workers can be reached; messages then go over UCX. Leaving the block normally
    closes gracefully (:meth:`Connection.aclose`), leaving it by an exception or a cancellation closes by force.

    Args:
        address: ``"host:port"``, ``"[v6]:port"``, ``(host, port)`` or ``"unix:/path"``.
        worker: the worker of the connection; by default the run's shared worker.
        connect_timeout: seconds for the look-up of the name, the control socket, the exchange and the greeting over UCX
            together.
        close_timeout: seconds that closing may take.
        window: bytes that we hold unread at most, before the peer's sends wait.
        max_message_size: the longest message that :meth:`Connection.receive` allocates memory for.
        happy_eyeballs_delay, local_address: for the control socket, see ``trio.open_tcp_stream``. UCX chooses the
            devices that the messages go over; its option NET_DEVICES restricts them.
        shared_memory: ``"auto"`` uses it where both sides can; True insists on it, False does without.
        keepalive_interval: seconds of silence after which the kernel asks whether the peer's host is still there. A
            host that vanished is noticed after about twice as long, rounded up to whole seconds; a process that is
            stopped is not taken for lost. 0 or ``math.inf`` is never. (A process that ends is noticed at once.)
        authkey: a secret that the listener must have, too: each side proves to the other that it knows it.
        ssl_context: runs the exchange under TLS, with certificates as the context says. Messages are not encrypted:
            UCX sends them as they are.
        server_hostname: the name that the listener's certificate must have; by default the host of ``address``.

    Cancellation: if entering the block is cancelled, no connection is left behind.

    Raises:
        TimeoutError: it took longer than ``connect_timeout``; the message says what was under way.
        OSError: refused, unreachable, an unknown host; ``errno`` says which. ``ssl.SSLError`` for certificates. Too few
            file descriptors are left (EMFILE).
        TypeError, ValueError: a wrong argument; a worker that cannot have Connections.
        UCXError: UCX cannot start, for the run's shared worker.
        trio.ClosedResourceError, trio.BrokenResourceError: ``worker`` was closed, or broke.
        RuntimeError: the context manager was entered before.
    """
    way = _Way.check(address, worker, connect_timeout, happy_eyeballs_delay, local_address)
    entry = make_entry(shared_memory, keepalive_interval, authkey, ssl_context, server_hostname)
    options = make_options(close_timeout, window, max_message_size)
    return _Connect(lambda: _open(way, entry, options))


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
    shared_memory: Literal["auto"] | bool = "auto",
    keepalive_interval: float = KEEPALIVE_INTERVAL,
    authkey: bytes | None = None,
    ssl_context: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
) -> Connection:
    """Connects to a trio_ucx listener, as ``trio.open_tcp_stream`` does over TCP; close the result.

    The arguments are :func:`connect`'s.

    Cancellation: no connection is left behind.

    Raises: as :func:`connect`.
    """
    way = _Way.check((host, port), worker, connect_timeout, happy_eyeballs_delay, local_address)
    entry = make_entry(shared_memory, keepalive_interval, authkey, ssl_context, server_hostname)
    return await _open(way, entry, make_options(close_timeout, window, max_message_size))


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
    shared_memory: Literal["auto"] | bool = "auto",
    keepalive_interval: float = KEEPALIVE_INTERVAL,
    authkey: bytes | None = None,
    ssl_context: ssl.SSLContext | None = None,
    isolate: bool = False,
) -> list[Listener]:
    """Opens a listener for each address of a host, by ``trio.open_tcp_listeners``; or at a Unix socket.

    Args:
        port: 0 chooses a free one.
        host: a name or address of this machine; None is every interface, IPv4 and IPv6. ``"unix:/path"``, with port 0,
            is a Unix socket; its file's permissions decide who can connect.
        worker: the worker of the connections; by default the run's shared worker.
        backlog: connections that may wait to be accepted; more clients are turned away. None is 1024.
        connect_timeout: seconds that a client has for the exchange and the greeting over UCX.
        close_timeout, window, max_message_size, shared_memory, keepalive_interval: of the connections, see
            :func:`connect`.
        authkey: a secret that clients must have, too.
        ssl_context: runs the exchanges under TLS; with ``verify_mode=ssl.CERT_REQUIRED`` clients need certificates.
        isolate: gives each connection a worker of its own, which is closed with it. A client that is killed while it
            writes to shared memory then harms no other connection. Each worker costs about 5 MB of memory, 16 file
            descriptors, and 10 ms to open, during which the program is blocked.

    Cancellation: no listener is left behind.

    Raises:
        OSError: the address is in use, or not ours; an unknown host; too few file descriptors are left (EMFILE).
        TypeError, ValueError: a wrong argument; a worker that cannot have Connections.
        UCXError: UCX cannot start, for the run's shared worker.
        trio.ClosedResourceError, trio.BrokenResourceError: ``worker`` was closed, or broke.
    """
    port = check_port(port)
    path = unix_path((host, port))
    check_worker(worker)
    backlog = check_integer(DEFAULT_BACKLOG if backlog is None else backlog, "backlog", 1, 2**31)
    timeout = check_timeout(connect_timeout, "connect_timeout")
    entry = make_entry(shared_memory, keepalive_interval, authkey, ssl_context)
    options = make_options(close_timeout, window, max_message_size)
    if not isinstance(isolate, bool):
        raise TypeError(f"isolate must be a bool, not {type(isolate).__name__}")
    if host is not None and not isinstance(host, str):
        raise TypeError(f"the host must be a str or None, not {type(host).__name__}")
    await trio.lowlevel.checkpoint()
    if path is not None:
        sockets = [open_unix_listener(path, min(backlog, MAX_KERNEL_BACKLOG))]
    else:
        sockets = [(control, _nothing) for control in await open_tcp_listeners(port, host)]
    listeners: list[Listener] = []
    try:
        target = worker or shared_worker()
        for control, on_close in sockets:
            acceptor = Acceptor(target, control, entry, options, timeout, backlog, on_close, isolate=isolate)
            listeners.append(Listener._create(acceptor))
    except BaseException:
        for listener in listeners:
            listener._acceptor.close()
        for control, on_close in sockets:
            control.socket.close()
            on_close()
        raise
    return listeners


def _nothing() -> None:
    pass


#: What the kernel may hold before we accept it. (It has a limit of its own, net.core.somaxconn.)
MAX_KERNEL_BACKLOG = 0xFFFF


async def open_tcp_listeners(port: int, host: str | None) -> list[trio.SocketListener]:
    """Trio's, with one port for all addresses of the host when ``port`` is 0.

    Raises:
        OSError: with the address that failed.
    """
    attempts = 10
    while True:
        attempts -= 1
        sockets = await _listen(port, host)
        chosen = {control.socket.getsockname()[1] for control in sockets}
        if port != 0 or len(chosen) == 1:
            return sockets
        for control in sockets:
            control.socket.close()
        try:
            return await _listen(chosen.pop(), host)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not attempts:
                raise


async def _listen(port: int, host: str | None) -> list[trio.SocketListener]:
    try:
        return await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        where = f"port {port}" if host is None else format_address((host, port))
        error.strerror = f"listening at {where}: {error.strerror or error}"
        raise


def split_loss(connection: Connection, error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Separates the errors that a connection raised because its peer was lost from all others.

    Returns:
        The first of these errors, and what is left of ``error`` without them; each is None if there is nothing.
    """
    core = connection._link.core
    if core.engine.broken is not None:
        return None, error  # the worker broke, not the connection

    def is_its_own(one: BaseException) -> bool:
        return isinstance(one, trio.BrokenResourceError) and origin_of(one) is core.origin

    if not isinstance(error, BaseExceptionGroup):
        return (error, None) if is_its_own(error) else (None, error)
    own, rest = error.split(is_its_own)
    first: BaseException | None = own
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first, rest


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

    When a handler returns, its connection is closed gracefully; when it raises, by force.

    A ``trio.BrokenResourceError`` of a handler's own connection, which the handler does not catch, says that this
    client was lost: it is logged (logger ``trio_ucx``, level INFO), and the server goes on. It is removed from
    exception groups, too. Every other exception ends the server, as in Trio: an error of another connection that the
    handler uses, ``trio.ClosedResourceError``, ``trio.EndOfChannel``, or an exception that was raised from a lost
    client's.

    Args:
        handler: an async function that takes a :class:`Connection`.
        port, host, worker: see :func:`open_ucx_listeners`, which also takes the ``options``.
        handler_nursery: where the handlers run; by default a nursery of its own.
        task_status: ``await nursery.start(serve_ucx, handler, 0)`` returns the listeners once they listen.

    Cancellation: closes the listeners, and cancels the handlers unless they run in ``handler_nursery``.

    Raises:
        ExceptionGroup: of what handlers raised (in ``handler_nursery``, that raises it), and of the listeners' errors:
            ``trio.ClosedResourceError`` when one was closed, ``trio.BrokenResourceError`` when the worker broke.
        OSError, TypeError, ValueError, UCXError: as :func:`open_ucx_listeners`.
        trio.ClosedResourceError, trio.BrokenResourceError: ``worker`` was closed, or broke, before the server listened.
    """
    listeners = await open_ucx_listeners(port, host=host, worker=worker, **options)

    async def handle(connection: Connection) -> None:
        rest: BaseException | None
        try:
            await handler(connection)
        except BaseException as error:
            loss, rest = split_loss(connection, error)
            if loss is not None:
                logger.info("%r: %s", connection, loss)
            connection.abort()
            if loss is None:
                raise
        else:
            rest = None
            try:
                await connection.aclose()
            except trio.BrokenResourceError as error:
                logger.info("%r: %s", connection, error)
        if rest is not None:
            raise rest  # outside the except block, so that the removed errors are not its context

    await trio.serve_listeners(handle, listeners, handler_nursery=handler_nursery, task_status=task_status)
