"""The paths of a measurement's payloads: a Connection, and beside it plain TCP between the same two processes.

For plain TCP the server listens at a port of its own for one stream, which must begin with a token that the server has
sent over the Connection. Control messages go over the Connection in either case.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from hmac import compare_digest
from typing import Protocol

import trio

from .. import Connection
from .errors import PerfError

CONTROL_TAG = 0
PAYLOAD_TAG = 1

#: Seconds that the server waits for a stream, and that the client tries to connect for.
STREAM_PATIENCE = 10
#: Seconds that the token may take once a stream is there.
_TOKEN_PATIENCE = 2


class PayloadPath(Protocol):
    """How payloads get to the other end."""

    async def send(self, piece: memoryview) -> None:
        """Sends one payload."""

    async def receive(self, place: memoryview) -> None:
        """Receives one payload."""

    async def send_many(self, pieces: Sequence[memoryview]) -> None:
        """Sends payloads, many in flight."""

    def receiving(self, places: Sequence[memoryview]) -> AbstractAsyncContextManager[None]:
        """Gets ready to receive payloads; they have arrived at the end of the block."""


class ConnectionPath:
    """Payloads are messages of a Connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def send(self, piece: memoryview) -> None:
        await self._connection.send(piece, tag=PAYLOAD_TAG)

    async def receive(self, place: memoryview) -> None:
        await self._connection.receive_into(place, tag=PAYLOAD_TAG)

    async def send_many(self, pieces: Sequence[memoryview]) -> None:
        async with self._connection.worker.open_request_group() as group:
            for piece in pieces:
                group.send(self._connection, piece, tag=PAYLOAD_TAG)

    @asynccontextmanager
    async def receiving(self, places: Sequence[memoryview]) -> AsyncIterator[None]:
        async with self._connection.worker.open_request_group() as group:
            for place in places:
                group.receive_into(self._connection, place, tag=PAYLOAD_TAG)
            yield


class StreamPath:
    """Payloads follow each other on a stream of Trio's; both ends know how long they are."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream

    async def send(self, piece: memoryview) -> None:
        await self._stream.send_all(piece)

    async def receive(self, place: memoryview) -> None:
        while place:
            count = await self._stream.socket.recv_into(place)
            if not count:
                raise PerfError("the other side has closed the plain TCP connection")
            place = place[count:]

    async def send_many(self, pieces: Sequence[memoryview]) -> None:
        for piece in pieces:
            await self._stream.send_all(piece)

    @asynccontextmanager
    async def receiving(self, places: Sequence[memoryview]) -> AsyncIterator[None]:
        yield
        # The places lie one behind the other: as much at once as there is.
        await self.receive(memoryview(places[0].obj)[: sum(map(len, places))])


@contextmanager
def broken_stream() -> Iterator[None]:
    """Says of which connection an error of the system is.

    Raises:
        PerfError: the plain TCP connection broke.
    """
    try:
        yield
    except OSError as error:
        raise PerfError(f"the plain TCP connection broke: {error}") from error


# ---- opening the stream ----


async def accept_stream(
    connection: Connection, tell: Callable[[Connection, dict[str, object]], Awaitable[None]]
) -> trio.SocketStream | str | None:
    """The server's part: tells the client where to connect.

    Returns:
        The stream; why there is none; None if the client has gone, or has said something else meanwhile.
    """
    address = connection.local_address
    token = secrets.token_hex()
    found: trio.SocketStream | None = None
    told = False
    try:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1" if address is None else address[0])
    except OSError as error:
        return f"it cannot listen at another port: {error}"
    port = listener.socket.getsockname()[1]
    try:
        async with listener:
            await tell(connection, {"plain_port": port, "token": token})
            async with trio.open_nursery() as nursery:

                async def until_told() -> None:
                    nonlocal told
                    with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel):
                        await connection.wait_message(tag=CONTROL_TAG)
                    told = True
                    nursery.cancel_scope.cancel()

                async def check(stream: trio.SocketStream) -> None:
                    nonlocal found
                    if await _begins_with(token.encode(), stream):
                        assert found is None  # nobody else has the token
                        found = stream
                        nursery.cancel_scope.cancel()

                nursery.start_soon(until_told)
                with trio.move_on_after(STREAM_PATIENCE), suppress(OSError):  # no descriptor is left, say
                    while True:
                        nursery.start_soon(check, await listener.accept())
                nursery.cancel_scope.cancel()
    except BaseException:
        if found is not None:
            await trio.aclose_forcefully(found)
        raise
    if found is None and not told:
        return f"nobody has connected to port {port} with the token"
    return found


async def _begins_with(token: bytes, stream: trio.SocketStream) -> bool:
    """Returns True if the stream begins with the token; if not, closes the stream."""
    given = bytearray(len(token))
    try:
        with trio.fail_after(_TOKEN_PATIENCE):
            await StreamPath(stream).receive(memoryview(given))
        if compare_digest(given, token):
            return True
    except (OSError, PerfError, trio.TooSlowError):
        pass
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    await trio.aclose_forcefully(stream)
    return False


async def connect_stream(connection: Connection, port: int, token: str) -> trio.SocketStream:
    """For the client: connects to the server's port, and sends the token.

    Raises:
        OSError, trio.BrokenResourceError: it cannot connect there.
    """
    assert connection.remote_address is not None
    with trio.move_on_after(STREAM_PATIENCE / 2):
        stream = await trio.open_tcp_stream(connection.remote_address[0], port)
        try:
            await stream.send_all(token.encode())
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return stream
    raise TimeoutError(f"no answer from port {port}")
