"""Opening a client that keeps a connection to one of several servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Unpack

from .. import Backoff, Connection, ConnectOptions
from .. import connect as connect_one
from .._util.background import BackgroundNursery
from .._util.contained import report
from .._util.hidden import hide_authkey
from .._util.interrupts import protected_asynccontextmanager
from ..ucp import Worker
from ._client import Client
from ._connections import ReopenedConnections, close
from ._errors import CallLost
from ._server import Hook
from ._service import Service

Address = str | tuple[str, int]


@protected_asynccontextmanager
async def connect(
    addresses: Address | list[Address],
    *,
    limit: int = 1000,
    service: type[Service] | None = None,
    errors: Iterable[type[Exception]] = (),
    hook: Hook | None = None,
    worker: Worker | None = None,
    **options: Unpack[ConnectOptions],
) -> AsyncIterator[Client]:
    """Connects to a server, or to the first of several that lets it in: an async context manager for a :class:`Client`.

    If the connection ends, or the server drains, the next call opens another one, to the next address first. Calls that
    come meanwhile wait for it, within their timeouts. A call that was lost is made again if it has certainly not run,
    or if it is idempotent.

    Leaving the block normally closes the connections gracefully, leaving it by an exception or a cancellation closes by
    force. Calls that are under way then end with ``trio.ClosedResourceError``.

    Args:
        addresses: of one server, as for :func:`trio_ucx.connect`, or a list of them.
        limit, service, errors, hook: see :class:`Client`.
        worker, options: of each connection, see :func:`trio_ucx.connect`. With ``retry=`` it tries again, as the
            :class:`trio_ucx.Backoff` says, while no server can be reached; without it each address is tried once, and
            then a call that needs a connection fails.

    Cancellation: no connection is left behind.

    Raises: as :func:`trio_ucx.connect`.
    """
    hide_authkey(options)
    several = list(addresses) if isinstance(addresses, list) else [addresses]
    if not several:
        raise ValueError("at least one address is needed")
    retry = options.pop("retry", None)
    if retry is not None and not isinstance(retry, Backoff):
        raise TypeError(f"retry must be a trio_ucx.Backoff, not {type(retry).__name__}")

    def opener(address: Address) -> Callable[[], Awaitable[Connection]]:
        connect_one(address, worker=worker, **options)  # checks the arguments
        return lambda: connect_one(address, worker=worker, **options).__aenter__()

    openers = [opener(address) for address in several]

    def failed(error: Exception) -> None:
        report("an internal error of trio_ucx.rpc ended a client", error)
        connections.closed = True

    async with BackgroundNursery("trio_ucx.rpc", failed) as nursery:
        connections = ReopenedConnections(nursery, openers, retry)
        given: Any = connections
        client = Client(given, limit=limit, service=service, errors=errors, hook=hook)
        problem: BaseException | None = None
        try:
            await connections.next()
        except CallLost as error:
            problem = error.__cause__ or error
        if problem is not None:  # with its own cause, and without the CallLost
            raise problem
        try:
            yield client
        finally:
            connections.closed = True
        for used in list(connections.held):
            await close(used.connection)
