"""Connections as anyio streams, for libraries that are written for anyio, on its trio backend.

::

    from trio_ucx.anyio import UCXListener, UCXStream

    stream = UCXStream(await trio_ucx.open_ucx_stream(host, port))

    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1")
    await UCXListener(listener).serve(handler)      # several: anyio.streams.stapled.MultiListener

Needs anyio 4, which trio_ucx does not install, and anyio's trio backend: under asyncio, opening anything raises a
RuntimeError that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from socket import AddressFamily
from typing import Any, NoReturn, SupportsIndex

import anyio
import trio
from anyio.abc import ByteStream, Listener, SocketAttribute, TaskGroup
from trio.lowlevel import enable_ki_protection

import trio_ucx

from ._opening.unix import PREFIX
from ._util.handles import refuse_copy

__all__ = ["UCXListener", "UCXStream"]


@contextmanager
def _anyio_errors() -> Iterator[None]:
    """Turns Trio's exceptions into anyio's of the same names."""
    try:
        yield
    except trio.ClosedResourceError as error:
        raise anyio.ClosedResourceError(*error.args) from error.__cause__
    except trio.BrokenResourceError as error:
        raise anyio.BrokenResourceError(*error.args) from error.__cause__
    except trio.BusyResourceError as error:
        raise anyio.BusyResourceError("using") from error


class UCXStream(ByteStream):
    """The byte stream of a Connection.

    Attributes:
        connection: the Connection, whose messages can be used at the same time.
    """

    connection: trio_ucx.Connection

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self, protocol)

    def __init__(self, connection: trio_ucx.Connection) -> None:
        self.connection = connection

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Receives 1 to ``max_bytes`` bytes (:meth:`trio_ucx.Connection.receive_some`).

        Cancellation: nothing is lost.

        Raises:
            anyio.EndOfStream: the peer has ended its half, or closed the connection.
            anyio.ClosedResourceError, anyio.BrokenResourceError: the connection was closed here; the peer is gone.
            anyio.BusyResourceError: another task is receiving.
            TypeError, ValueError: a wrong ``max_bytes``.
        """
        with _anyio_errors():
            data = await self.connection.receive_some(max_bytes)
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        """Sends bytes (:meth:`trio_ucx.Connection.send_all`).

        Cancellation: as :meth:`trio_ucx.Connection.send_all`.

        Raises:
            anyio.ClosedResourceError: the connection was closed here, or :meth:`send_eof` called.
            anyio.BrokenResourceError: the peer closed the connection, or is gone.
            anyio.BusyResourceError: another task is sending.
            TypeError: not a bytes-like object.
        """
        with _anyio_errors():
            await self.connection.send_all(item)

    async def send_eof(self) -> None:
        """Ends our half (:meth:`trio_ucx.Connection.send_eof`).

        Cancellation: as :meth:`trio_ucx.Connection.send_eof`.

        Raises:
            anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.BusyResourceError: as for :meth:`send`.
        """
        with _anyio_errors():
            await self.connection.send_eof()

    async def aclose(self) -> None:
        """Closes gracefully (:meth:`trio_ucx.Connection.aclose`).

        Cancellation: as :meth:`trio_ucx.Connection.aclose`.

        Raises:
            anyio.BrokenResourceError: what was sent may not have been delivered, and no operation has said so yet.
        """
        with _anyio_errors():
            await self.connection.aclose()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """anyio's attributes of the control socket. The addresses of a Unix socket are paths, "" without a name."""
        return {
            **_attributes(self.connection.local_address, SocketAttribute.local_address, SocketAttribute.local_port),
            **_attributes(self.connection.remote_address, SocketAttribute.remote_address, SocketAttribute.remote_port),
        }


class UCXListener(Listener[UCXStream]):
    """A listener of trio_ucx.

    Attributes:
        listener: the :class:`trio_ucx.Listener`.
    """

    listener: trio_ucx.Listener

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self, protocol)

    def __init__(self, listener: trio_ucx.Listener) -> None:
        self.listener = listener

    @enable_ki_protection
    async def serve(self, handler: Callable[[UCXStream], Any], task_group: TaskGroup | None = None) -> None:
        """Accepts clients and starts ``handler(stream)`` for each in the task group, by default one of its own.

        As everywhere in anyio, the handler closes the stream.

        Cancellation: no connection is lost. Handlers in a task group of its own are cancelled; the listener stays open.

        Raises:
            anyio.ClosedResourceError, anyio.BrokenResourceError: the listener was closed; its worker broke.
            ExceptionGroup: without ``task_group``: of these, and of what handlers raised.
        """
        async with AsyncExitStack() as stack:
            group = task_group
            if group is None:
                group = await stack.enter_async_context(anyio.create_task_group())
            while True:
                with _anyio_errors():
                    connection = await self.listener.accept()
                try:
                    group.start_soon(handler, UCXStream(connection))
                except BaseException:  # the user's task group has ended
                    connection.abort()
                    raise

    async def aclose(self) -> None:
        """Stops listening (:meth:`trio_ucx.Listener.aclose`).

        Cancellation: as :meth:`trio_ucx.Listener.aclose`.

        Raises: nothing, closed already or not.
        """
        await self.listener.aclose()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """anyio's attributes of the address that it is bound to."""
        return _attributes(self.listener.address, SocketAttribute.local_address, SocketAttribute.local_port)


def _attributes(address: tuple[str, int] | None, whole: Any, port: Any) -> dict[Any, Callable[[], Any]]:
    if address is None or address[0].startswith(PREFIX):  # only a Unix socket can be without a name
        path = "" if address is None else address[0].removeprefix(PREFIX)
        return {SocketAttribute.family: lambda: AddressFamily.AF_UNIX, whole: lambda: path}
    family = AddressFamily.AF_INET6 if ":" in address[0] else AddressFamily.AF_INET
    return {SocketAttribute.family: lambda: family, whole: lambda: address, port: lambda: address[1]}
