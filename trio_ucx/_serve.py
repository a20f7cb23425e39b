"""Opening listeners and serving: ``open_ucx_listeners`` and ``serve_ucx``."""

from __future__ import annotations

import errno
import inspect
import logging
import ssl
import threading
from typing import Literal, Unpack

import trio
from trio.lowlevel import enable_ki_protection

from ._handshake.server import Acceptor
from ._listener import Listener
from ._opening.addresses import listening_address
from ._opening.options import KEEPALIVE_INTERVAL, ListenerOptions, check_exchange_options, check_options, check_worker
from ._opening.unix import open_unix_listener, unix_path
from ._peer_info import Admit
from ._server import Handler, OnHandlerError, Server
from ._util.arguments import check_in_trio, check_integer, check_timeout
from ._util.hidden import hide, hide_authkey
from ._util.picklable import with_text
from ._util.socket_addresses import SocketAddress, format_address
from .ucp import Worker

logger = logging.getLogger("trio_ucx")

#: ``backlog``, by default.
DEFAULT_BACKLOG = 1024
#: The kernel's queue of sockets that we have not accepted, whatever ``backlog`` is: clients wait there when a listener
#: has no room. (The kernel has a limit of its own, net.core.somaxconn.)
MAX_KERNEL_BACKLOG = 0xFFFF


@enable_ki_protection
async def open_ucx_listeners(
    port: int | SocketAddress,
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
    allow_anyone: bool = False,
    admit: Admit | None = None,
) -> list[Listener]:
    """Opens a listener for each address of a host, with ``trio.open_tcp_listeners``, or one at a Unix socket.

    A client that is let in can take over the process, because UCX trusts its peers. Without ``authkey=``, and without
    an ``ssl_context=`` that requires certificates, a TCP listener is therefore in *protected mode*: it lets in only
    clients of its own user, or of root, on its own machine. The error that other clients get names the reason.

    Args:
        port: 0 chooses a free one. Or an address, without ``host=``: ``"host:port"``, ``"[v6]:port"``,
            ``(host, port)``, or ``"unix:/path"``, a Unix socket, whose file's permissions decide who can connect.
        host: a name or address of this machine; None means every interface, IPv4 and IPv6.
        worker: the worker of the connections; by default the run's shared worker.
        backlog: the greatest number of clients that were let in and not accepted yet. Further clients wait until there
            is room, or until their or the listener's ``connect_timeout`` ends. None means 1024.
        connect_timeout: seconds that a client has for the exchange and the greeting over UCX.
        close_timeout, window, max_message_size, shared_memory, keepalive_interval: of the connections, see
            :func:`connect`.
        authkey: a key that clients must have, too, of 16 bytes or more, such as ``secrets.token_bytes(32)``.
        ssl_context: runs the exchanges over TLS; with ``verify_mode=ssl.CERT_REQUIRED`` clients need certificates.
            Otherwise TLS keeps nobody out: the listener logs a warning, and stays in protected mode.
        isolate: gives each connection a worker of its own, which is closed with it. A client that is killed while it
            writes to shared memory then harms no other connection. Each worker costs about 5 MB of memory, 16 file
            descriptors, and 10 ms to open, during which the program is blocked.
        allow_anyone: switches protected mode off. Every client that can reach the port is let in, unless ``authkey``
            or ``ssl_context`` keeps it out.
        admit: an async function that decides about each client that the rest lets in: it gets the client's
            :class:`PeerInfo`, before UCX sees any data of the client, and returns True or False. It runs in a task of
            its own for each client, within ``connect_timeout``. If it raises, the client is not let in either, and the
            exception is logged (logger ``trio_ucx``, at ERROR, at most once a minute).

    Cancellation: no listener is left behind.

    Raises:
        OSError: the address is in use, or not of this machine; an unknown host; too few file descriptors are left
            (EMFILE). PermissionError: strangers cannot be kept away from UCX's ports.
        TypeError, ValueError: a wrong argument; a worker that cannot have Connections.
        UCXError: UCX cannot start, for the run's shared worker.
        RuntimeError: a raw receive waits on ``worker`` that could take messages of its first Connection.
        trio.ClosedResourceError, trio.BrokenResourceError: ``worker`` was closed, or broke.
    """
    authkey = hide(authkey)
    check_in_trio()
    host, port = listening_address(port, host)
    path = unix_path((host, port))
    check_worker(worker)
    backlog = check_integer(DEFAULT_BACKLOG if backlog is None else backlog, "backlog", 1, 2**31)
    timeout = check_timeout(connect_timeout, "connect_timeout")
    exchange_options = check_exchange_options(
        shared_memory, keepalive_interval, authkey, ssl_context, isolate=isolate, allow_anyone=allow_anyone, admit=admit
    )
    options = check_options(close_timeout, window, max_message_size)
    await trio.lowlevel.checkpoint()
    if path is not None:
        sockets = [open_unix_listener(path, MAX_KERNEL_BACKLOG)]
    else:
        sockets = [(control, _nothing) for control in await open_tcp_listeners(port, host)]
    listeners: list[Listener] = []
    try:
        check_worker(worker)  # it may have closed meanwhile
        target = worker or Worker._shared()
        for control, on_close in sockets:
            acceptor = Acceptor(target, control, exchange_options, options, timeout, backlog, on_close)
            listeners.append(Listener._create(acceptor))
        if ssl_context is not None and path is None and not exchange_options.keeps_strangers_out and not allow_anyone:
            logger.warning(
                "the listener at %s lets in only clients of its own user, on its own machine (protected mode): its "
                "ssl_context requires no certificates. Set its verify_mode to ssl.CERT_REQUIRED, or use authkey= or "
                "allow_anyone=True",
                " and ".join(format_address(listener.address) for listener in listeners),
            )
    except BaseException:
        for listener in listeners:
            listener._acceptor.close()
        for control, on_close in sockets:
            on_close()
            control.socket.close()
        raise
    return listeners


def _nothing() -> None:
    pass


async def open_tcp_listeners(port: int, host: str | None) -> list[trio.SocketListener]:
    """Listens by ``trio.open_tcp_listeners``, with one port for all addresses of the host if ``port`` is 0.

    Raises:
        OSError: the message names the address that failed.
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
        with_text(error, f"listening at {where}: {error.strerror or error}")
        raise


@enable_ki_protection
async def serve_ucx(
    handler: Handler,
    port: int | SocketAddress,
    *,
    host: str | None = None,
    worker: Worker | None = None,
    handler_nursery: trio.Nursery | None = None,
    on_handler_error: OnHandlerError = "raise",
    drain_on_signal: float | None = None,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
    **options: Unpack[ListenerOptions],
) -> None:
    """Listens, and runs ``handler(connection)`` in a task for each client, as ``trio.serve_tcp`` does over TCP.

    When a handler returns, its connection is closed gracefully; when it raises, by force.

    What a handler's own connection raises because of its client ends that handler alone,
    with a log line that has the handler's name and where it stood (logger ``trio_ucx``): ``trio.EndOfChannel`` and
    :class:`PeerClosed`, when the client has closed in order, at DEBUG, and the connection is closed gracefully;
    :class:`PeerLost`, :class:`MessageTooLong`, :class:`UnexpectedMessage`, and the ``MemoryError`` for a message, at
    WARNING (INFO if the client had sent nothing and its process did not die), one line a minute for each reason. They
    are removed from exception groups. Every other exception ends the server, as in Trio: an error of another connection
    that the handler uses, ``trio.ClosedResourceError``, or an exception that was raised from an error of its own
    connection, as ``trio.SSLStream`` does.

    It returns when all listeners were closed, by :meth:`Server.drain` or one by one, and the handlers have ended.

    Args:
        handler: an async function that takes a :class:`Connection`.
        port, host, worker: see :func:`open_ucx_listeners`, which also takes the ``options``. ``port`` may be an
            address: ``"10.0.0.5:13337"``, ``"unix:/path"``.
        handler_nursery: where the handlers run; by default a nursery of its own.
        on_handler_error: what an exception of a handler does, if it does not come from the handler's own client:
            ``"raise"`` ends the server; ``"log"`` logs it with its traceback, at ERROR; a function is called with the
            connection and the exception. In the last two cases only that handler ends.
        drain_on_signal: SIGTERM or SIGINT drains the server (:meth:`Server.drain`), with this timeout in seconds; a
            second signal cancels what is left. Several servers may do so. Only in the main thread.
        task_status: ``await nursery.start(serve_ucx, handler, 0)`` returns the :class:`Server` once it listens.

    Cancellation: closes the listeners, and cancels the handlers unless they run in ``handler_nursery``.

    Raises:
        ExceptionGroup: of what handlers raised (in ``handler_nursery``, that raises it), and of
            ``trio.BrokenResourceError`` when the worker broke.
        OSError, TypeError, ValueError, UCXError, RuntimeError: as :func:`open_ucx_listeners`.
        trio.ClosedResourceError, trio.BrokenResourceError: ``worker`` was closed, or broke, before the server listened.
    """
    hide_authkey(options)
    if on_handler_error not in ("raise", "log") and not callable(on_handler_error):
        raise ValueError(f"on_handler_error must be 'raise', 'log' or a function, not {on_handler_error!r}")
    if inspect.iscoroutinefunction(on_handler_error):
        raise TypeError("on_handler_error must be a plain function, not an async one")
    if drain_on_signal is not None:
        drain_on_signal = check_timeout(drain_on_signal, "drain_on_signal")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("drain_on_signal= works only in the main thread, where Python receives signals")
    listeners = await open_ucx_listeners(port, host=host, worker=worker, **options)
    server = Server._create(tuple(listeners), handler, on_handler_error)
    async with trio.open_nursery() as nursery:
        server._start(nursery, handler_nursery or nursery, drain_on_signal)
        task_status.started(server)
    await server._wait_until(lambda: not server._running)  # handlers in a nursery of the user's
