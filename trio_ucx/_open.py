"""Opening connections: ``connect`` and ``open_ucx_stream``."""

from __future__ import annotations

import errno
import math
import os
import socket
import ssl
import types
from collections.abc import Coroutine, Generator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Unpack

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ._connection import Connection
from ._errors import NotAdmitted, NotTrioUCX, ServerDraining, ServerFull
from ._handshake.client import Connector
from ._handshake.handshake import ExchangeOptions
from ._handshake.registry import WorkerConnections
from ._link import Options
from ._opening.addresses import addresses_in
from ._opening.backoff import Backoff, is_temporary
from ._opening.options import KEEPALIVE_INTERVAL, ConnectOptions, check_exchange_options, check_options, check_worker
from ._opening.unix import unix_path
from ._util.arguments import check_in_trio, check_timeout
from ._util.handles import OpenedNotConstructed
from ._util.hidden import hide, hide_authkey
from ._util.picklable import with_text
from ._util.socket_addresses import (
    Resolved,
    SocketAddress,
    check_is_ours,
    check_local_address,
    format_address,
    resolve,
    split_address,
)
from .ucp import Worker
from .ucp._internal_api import descriptors

#: Where a connection can go: ``"host:port"``, ``"[v6]:port"``, ``(host, port)`` or ``"unix:/path"``.
Address = SocketAddress

#: Seconds: the default of ``trio.open_tcp_stream``.
HAPPY_EYEBALLS_DELAY = 0.25
#: Seconds between two attempts to connect to a Unix socket whose queue is full.
UNIX_RETRY = 0.02
#: Bytes of ``sockaddr_un.sun_path``, without the null character.
_LONGEST_PATH = 107


@attrs.frozen
class _Destination:
    """Where a connection goes, and how it gets there.

    Attributes:
        address: a host and port, or the path of a Unix socket.
        timeout: seconds for everything.
        ip: of the addresses of a host, the one to connect to; "" leaves that to Trio.
    """

    address: tuple[str, int] | str
    worker: Worker | None
    timeout: float
    happy_eyeballs_delay: float | None
    local_address: Resolved | None
    ip: str = ""

    @classmethod
    def check(
        cls,
        address: Address,
        worker: Worker | None,
        connect_timeout: float,
        happy_eyeballs_delay: float | None,
        local_address: str | None,
    ) -> _Destination:
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
        return f"unix:{self.address}" if isinstance(self.address, str) else format_address(self.address)

    async def open_socket(self) -> trio.SocketStream:
        """Connects the control socket, by ``trio.open_tcp_stream`` or ``trio.open_unix_socket``.

        Raises:
            OSError: always with an errno. (When all attempts failed, Trio's own error has none.)
        """
        try:
            if isinstance(self.address, str):
                return await _open_unix_socket(self.address)
            host, port = self.ip or self.address[0], self.address[1]
            local = None
            if self.local_address is not None:
                check_is_ours(self.local_address)  # Trio would say that it is incompatible with the remote address
                local = self.local_address.ip
            elif (family := _family_of_ip(host)) is not None:
                return await _open_tcp_socket(family, host, port)
            # Trio's documentation says that None makes one attempt at a time, but its code takes None for the default.
            delay = math.inf if self.happy_eyeballs_delay is None else self.happy_eyeballs_delay
            return await trio.open_tcp_stream(host, port, happy_eyeballs_delay=delay, local_address=local)
        except UnicodeError as error:
            raise ValueError(f"connecting to {self.label} is not possible: {error}") from None
        except OSError as error:
            if error.errno is not None:
                with_text(error, f"connecting to {self.label}: {error.strerror}{_hint(error.errno)}")
                raise
            raise _with_errno(error) from error.__cause__

    async def others(self, tried: str, deadline: float) -> list[_Destination]:
        """Returns the same destination with each other IP address of its host."""
        if isinstance(self.address, str):
            return []
        found: list[Resolved] = []
        with trio.move_on_at(deadline), suppress(OSError):
            found = await resolve(*self.address)
        ips = [f"{each.ip}%{each.scope}" if each.scope else each.ip for each in found if each.ip != tried]
        return [attrs.evolve(self, ip=ip) for ip in ips]


def _family_of_ip(host: str) -> socket.AddressFamily | None:
    """The family of an IP address without a zone; None for other hosts."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return family
    return None


async def _open_tcp_socket(family: socket.AddressFamily, ip: str, port: int) -> trio.SocketStream:
    """Connects to one IP address, with three schedule points fewer than ``trio.open_tcp_stream``."""
    connecting = trio.socket.socket(family)
    try:
        await connecting.connect((ip, port))
    except BaseException as error:
        connecting.close()
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno)) from None
        raise
    return trio.SocketStream(connecting)


async def _open_unix_socket(path: str) -> trio.SocketStream:
    """Connects to a Unix socket. Tries again as long as the kernel's queue of the listener is full."""
    if len(os.fsencode(path)) > _LONGEST_PATH:  # Python's own error has no errno
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    while True:
        stream = await trio.open_unix_socket(path)
        try:
            stream.socket.getpeername()
        except OSError:  # connect() said EAGAIN, which Trio takes for EINPROGRESS
            stream.socket.close()
            await trio.sleep(UNIX_RETRY)
        else:
            return stream


def _with_errno(error: OSError) -> OSError:
    """Returns what Trio raises when all attempts failed, with the errno of the first one and the message of each."""
    cause = error.__cause__
    causes = [each for each in (cause.exceptions if isinstance(cause, BaseExceptionGroup) else [cause]) if each]
    numbers = [each.errno for each in causes if isinstance(each, OSError) and each.errno is not None]
    # Trio gives no number if local_address= is of another family than every address of the host.
    number = numbers[0] if numbers else errno.EAFNOSUPPORT
    messages = "; ".join(dict.fromkeys(map(str, causes)))
    return OSError(number, f"{error}: {messages}{_hint(number)}")


def _hint(number: int) -> str:
    """Returns what to look at first, for an errno."""
    if number == errno.ENETUNREACH:
        return "; is the network device up (ip link), and is there a route (ip route)?"
    if number == errno.EACCES:
        return "; the permissions of a Unix socket and of its folder say who may connect (ls -l)"
    return "; is a listener open there?" if number in (errno.ECONNREFUSED, errno.ENOENT) else ""


async def _open(
    destinations: list[_Destination], exchange_options: ExchangeOptions, options: Options, retry: Backoff | None
) -> Connection:
    check_in_trio()
    if retry is not None:
        if not isinstance(retry, Backoff):
            raise TypeError(f"retry must be a trio_ucx.Backoff, not {type(retry).__name__}")
        return await retry._run(lambda: _open(destinations, exchange_options, options, None))
    errors: list[OSError] = []
    for destination in destinations:
        try:
            return await _open_one(destination, exchange_options, options)
        except OSError as error:
            if len(destinations) == 1:
                raise
            errors.append(error)
    try:
        raise _all_failed(errors) from ExceptionGroup("connecting failed at each address", errors)
    finally:
        del errors  # their tracebacks refer to this frame


def _all_failed(errors: list[OSError]) -> OSError:
    """Returns one error for several addresses: that of the first address where another attempt may succeed, if any."""
    first = next(filter(is_temporary, errors), errors[0])
    number = first.errno or errno.EIO
    text = f"none of {len(errors)} addresses could be connected to: "
    text += " ".join(f"({place}) {error.strerror or error}" for place, error in enumerate(errors, 1))
    if isinstance(first, (ServerDraining, ServerFull, NotAdmitted, NotTrioUCX)):
        return type(first)(number, text, first.address)
    return socket.gaierror(number, text) if isinstance(first, socket.gaierror) else OSError(number, text)


async def _open_one(destination: _Destination, exchange_options: ExchangeOptions, options: Options) -> Connection:
    await trio.lowlevel.checkpoint_if_cancelled()
    check_worker(destination.worker)
    descriptors.require(descriptors.CONNECTION, f"connecting to {destination.label}")
    registry = WorkerConnections.of(destination.worker or Worker._shared())
    tls = exchange_options.ssl_context
    if tls is not None and exchange_options.server_hostname is None and not isinstance(destination.address, str):
        exchange_options = attrs.evolve(exchange_options, server_hostname=destination.address[0])
    if tls is not None and tls.check_hostname and exchange_options.server_hostname is None:
        # The ssl module would check no name.
        raise ValueError(
            "server_hostname= is missing: name the host that the certificate of the listener at the Unix socket must "
            "name, or use an ssl_context with check_hostname=False"
        )

    def connector(destination: _Destination) -> Connector:
        left = max(0.0, deadline - trio.current_time())
        return Connector(registry, destination.open_socket, destination.label, exchange_options, options, left)

    deadline = trio.current_time() + destination.timeout
    first = connector(destination)
    try:
        return Connection._wrap(await first.run())
    except OSError:
        if first.met_other_program and first.remote is not None:
            for other in await destination.others(first.remote[0], deadline):
                again = connector(other)
                if again.timeout <= 0:
                    break
                try:
                    return Connection._wrap(await again.run())
                except OSError:
                    if again.remote is not None and not again.met_other_program:  # this is the listener, and says why
                        raise
        raise


@types.coroutine
def _steps(coroutine: Coroutine[Any, Any, Connection]) -> Generator[Any, Any, Connection]:
    """Runs a coroutine for an ``__await__``: as a generator, so that Trio's task tree and reports see through it."""
    connection: Connection = yield from coroutine
    return connection


@attrs.define(eq=False, repr=False)
class Connecting(metaclass=OpenedNotConstructed):
    """What :func:`connect` returns: ``async with`` opens the :class:`Connection`, and closes it at the end.

    ``await`` opens and returns it; the caller then closes it.

    Cancellation: as :func:`connect`.
    """

    # A class, because a KeyboardInterrupt can end a generator between any two of its lines.

    _destinations: list[_Destination]
    _exchange_options: ExchangeOptions
    _options: Options
    _retry: Backoff | None
    _connection: Connection | None = None

    @enable_ki_protection
    async def __aenter__(self) -> Connection:
        if self._connection is not None:
            raise RuntimeError("connect(...) can be entered or awaited once; call connect again for another connection")
        self._connection = await _open(self._destinations, self._exchange_options, self._options, self._retry)
        return self._connection

    @enable_ki_protection
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._connection is not None
        await self._connection.__aexit__(exc_type, exc, traceback)

    def __await__(self) -> Generator[Any, Any, Connection]:
        return (yield from _steps(self.__aenter__()))

    def __repr__(self) -> str:
        return f"<trio_ucx.Connecting to {', '.join(destination.label for destination in self._destinations)}>"


def connect(
    address: Address | Sequence[Address],
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
    isolate: bool = False,
    retry: Backoff | None = None,
) -> Connecting:
    """Connects to a trio_ucx listener; an async context manager that returns a :class:`Connection`.

    ``await connect(...)`` returns the Connection, too, which the caller then has to close.

    A connection begins on a TCP or Unix socket, the *control socket*. There the two sides authenticate each other if
    asked to, and describe how their UCX workers can be reached. Messages then go over UCX. Leaving the block normally
    closes gracefully (:meth:`Connection.aclose`), leaving it by an exception or a cancellation closes by force.

    Args:
        address: ``"host:port"``, ``"[v6]:port"``, ``(host, port)`` or ``"unix:/path"``. Several of them, as in
            ``["a:1", "b:1"]``, are tried in this order until one succeeds. If another program listens at one IP address
            of a host, its others are tried.
        worker: the worker of the connection; by default the run's shared worker.
        connect_timeout: seconds for everything at one address, all IP addresses of its host included: the look-up of
            the name, the control socket, the exchange and the greeting over UCX.
        close_timeout: seconds that closing may take.
        window: bytes of unread messages that we hold at most; then the peer's sends wait.
        max_message_size: the longest message that :meth:`Connection.receive` allocates memory for.
        happy_eyeballs_delay, local_address: for the control socket, see ``trio.open_tcp_stream``. UCX chooses the
            devices for the messages; its option NET_DEVICES restricts them.
        shared_memory: ``"auto"`` uses it if both sides can; True insists on it, False excludes it.
        keepalive_interval: seconds of silence after which the kernel asks whether the peer's host is still there. A
            host that vanished is noticed after about twice as long, rounded up to whole seconds, and after 4 seconds at
            least; a process that is stopped does not count as lost. 0 or ``math.inf``: never. (A process that ends is
            noticed at once.)
        authkey: a key that both sides must have, of 16 bytes or more, such as ``secrets.token_bytes(32)``: each proves
            to the other that it knows the key. A listener can take over its clients as a client can take over a
            listener, so the key also protects the client from false listeners.
        ssl_context: runs the exchange over TLS, with the certificates of the context. Messages are not encrypted: UCX
            sends them as they are.
        server_hostname: the name that the listener's certificate must have; by default the host of ``address``.
        isolate: gives the connection a worker of its own, which is closed with it, and so an endpoint of its own.
            Otherwise it shares the endpoint with all connections between the same two workers, and its small messages
            wait behind their large ones. A worker costs about 5 MB of memory, 16 file descriptors, and 10 ms to open,
            during which the program is blocked.
        retry: tries again as a :class:`Backoff` says, each time at all addresses. ``connect_timeout`` is then for each
            attempt.

    Cancellation: if entering the block is cancelled, no connection is left behind.

    Raises:
        TimeoutError: it took longer than ``connect_timeout``; the message says what was under way.
        ServerDraining, ServerFull: try another server, or later.
        NotAdmitted: a wrong or missing ``authkey`` or certificate, protected mode, a listener whose ``admit=`` does not
            let the client in, or sides that cannot work together.
        NotTrioUCX: something else listens there.
        OSError: nobody listens there, unreachable, an unknown host; ``errno`` says which. Too few file descriptors are
            left (EMFILE). PermissionError: strangers cannot be kept away from UCX's ports. If none of several addresses
            can be connected to, the exception is of the type for the first one where a later attempt may succeed, or
            for the first one. Its text says what failed at each, and its ``__cause__`` is a group of these errors.
        TypeError, ValueError: a wrong argument; a worker that cannot have Connections.
        UCXError: UCX cannot start, for the run's shared worker.
        trio.ClosedResourceError, trio.BrokenResourceError: ``worker`` was closed, or broke.
        RuntimeError: the context manager was entered or awaited before; a raw receive waits on ``worker`` that could
            take messages of its first Connection.
    """
    authkey = hide(authkey)
    destinations = [
        _Destination.check(one, worker, connect_timeout, happy_eyeballs_delay, local_address)
        for one in addresses_in(address)
    ]
    exchange_options = check_exchange_options(
        shared_memory, keepalive_interval, authkey, ssl_context, server_hostname, isolate=isolate
    )
    options = check_options(close_timeout, window, max_message_size)
    return Connecting._create(destinations, exchange_options, options, retry)


@enable_ki_protection
async def open_ucx_stream(
    host: str, port: int, *, worker: Worker | None = None, **options: Unpack[ConnectOptions]
) -> Connection:
    """Connects to a trio_ucx listener, as ``trio.open_tcp_stream`` does over TCP; close the result.

    The arguments are :func:`connect`'s.

    Cancellation: no connection is left behind.

    Raises: as :func:`connect`.
    """
    hide_authkey(options)
    return await connect((host, port), worker=worker, **options)
