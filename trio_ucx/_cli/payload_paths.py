"""The paths of a measurement's payloads: Connections, and beside them plain TCP between the same two processes.

For each stream of plain TCP the server listens at a port of its own. The stream must begin with a token that the server
has sent over the Connection. Control messages go over the first Connection in any case.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from hmac import compare_digest
from typing import Protocol

import trio

from .. import Connection
from ..ucp import ActiveMessages, RemoteMemory
from .errors import PerfError
from .rounds import ROUND_BYTES, Part, PerfOperation, Round

CONTROL_TAG = 0
#: The tag, or the id of active messages, of the first flow; the other flows have the next ones.
PAYLOAD_TAG = 1

#: Seconds that the server waits for a stream, and that the client tries to connect for.
STREAM_PATIENCE = 10
#: Seconds that the token may take once a stream is there.
_TOKEN_PATIENCE = 2


class PayloadPath(Protocol):
    """How the payloads of one flow get to the other end."""

    async def send(self, piece: memoryview) -> None:
        """Sends one payload."""

    async def receive(self, place: memoryview) -> None:
        """Receives one payload."""

    async def send_many(self, part: Part) -> None:
        """Sends payloads, many in flight."""

    def receiving(self, part: Part) -> AbstractAsyncContextManager[None]:
        """Gets ready to receive payloads; they have arrived at the end of the block."""


class ConnectionPath:
    """Payloads are messages of a Connection."""

    def __init__(self, connection: Connection, tag: int = PAYLOAD_TAG) -> None:
        self._connection, self._tag = connection, tag

    async def send(self, piece: memoryview) -> None:
        await self._connection.send(piece, tag=self._tag)

    async def receive(self, place: memoryview) -> None:
        await self._connection.receive_into(place, tag=self._tag)

    async def send_many(self, part: Part) -> None:
        async with self._connection.worker.open_request_group() as group:
            for piece in part.pieces:
                group.send(self._connection, piece, tag=self._tag)

    @asynccontextmanager
    async def receiving(self, part: Part) -> AsyncIterator[None]:
        async with self._connection.worker.open_request_group() as group:
            for place in part.pieces:
                group.receive_into(self._connection, place, tag=self._tag)
            yield


class ActiveMessagePath:
    """Payloads are active messages, to a queue of their own at either end, which has room for a whole round."""

    def __init__(self, connection: Connection, queue: ActiveMessages, id: int) -> None:
        self._connection, self._queue, self._id = connection, queue, id

    async def send(self, piece: memoryview) -> None:
        await self._connection.endpoint.am_send(self._id, piece)

    async def receive(self, place: memoryview) -> None:
        await (await self._queue.receive()).receive_into(place)

    async def send_many(self, part: Part) -> None:
        async with self._connection.worker.open_request_group() as group:
            for piece in part.pieces:
                group.am_send(self._connection.endpoint, self._id, piece)

    @asynccontextmanager
    async def receiving(self, part: Part) -> AsyncIterator[None]:
        yield
        for place in part.pieces:
            await self.receive(place)


class _BytesPath(ABC):
    """Payloads follow each other as bytes; both ends know how long they are."""

    @abstractmethod
    async def send(self, piece: memoryview) -> None:
        """Sends all of it."""

    @abstractmethod
    async def receive(self, place: memoryview) -> None:
        """Receives until it is full."""

    async def send_many(self, part: Part) -> None:
        for piece in part.pieces:
            await self.send(piece)

    @asynccontextmanager
    async def receiving(self, part: Part) -> AsyncIterator[None]:
        yield
        await self.receive(part.data)  # as much at once as there is


class ByteStreamPath(_BytesPath):
    """Payloads are bytes of the byte stream of a Connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def send(self, piece: memoryview) -> None:
        await self._connection.send_all(piece)

    async def receive(self, place: memoryview) -> None:
        while place:
            data = await self._connection.receive_some(len(place))
            if not data:
                raise PerfError("the other side has ended the byte stream")
            place[: len(data)] = data
            place = place[len(data) :]


class StreamPath(_BytesPath):
    """Payloads are bytes of a stream of Trio's."""

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


class RemoteMemoryPath:
    """Payloads are put into memory of the server, or got from there: the client's end, which acts alone."""

    def __init__(self, connection: Connection, memory: RemoteMemory) -> None:
        self._connection, self._memory = connection, memory

    async def put(self, piece: memoryview, offset: int) -> None:
        """Returns when the data is in the peer's memory."""
        await self._memory.put(piece, offset)
        await self._memory.flush()

    async def get(self, place: memoryview, offset: int) -> None:
        await self._memory.get_into(place, offset)

    async def put_many(self, part: Part) -> None:
        async with self._connection.worker.open_request_group() as group:
            for number, piece in enumerate(part.pieces):
                group.put(self._memory, piece, part.offset + number * len(piece))
        await self._memory.flush()

    async def get_many(self, part: Part) -> None:
        async with self._connection.worker.open_request_group() as group:
            for number, place in enumerate(part.pieces):
                group.get_into(self._memory, place, part.offset + number * len(place))


class Paths:
    """The paths of one end, by operation and flow. A context manager, which closes the queues of active messages.

    Attributes:
        connections: the flows are spread over them.
        streams: plain TCP, a connection for each flow.
    """

    def __init__(self, connections: list[Connection]) -> None:
        self.connections = connections
        self.streams: list[PayloadPath] = []
        self._opened: dict[PerfOperation, list[PayloadPath]] = {}
        self._queues = ExitStack()

    def for_round(self, round: Round) -> list[PayloadPath]:
        """Returns the path of each flow."""
        found = self.streams if round.plain else self._opened.setdefault(round.operation, [])
        while len(found) < round.flows and not round.plain:
            found.append(self._open(round.operation, len(found)))
        if len(found) < round.flows:
            raise PerfError("the client asks for a round over plain TCP, which it has not opened")
        return found[: round.flows]

    def _open(self, operation: PerfOperation, flow: int) -> PayloadPath:
        connection = self.connections[flow % len(self.connections)]
        if operation is PerfOperation.ACTIVE_MESSAGES:
            queue = connection.worker.open_active_messages(PAYLOAD_TAG + flow, max_bytes=2 * ROUND_BYTES)
            return ActiveMessagePath(connection, self._queues.enter_context(queue), PAYLOAD_TAG + flow)
        if operation is PerfOperation.BYTE_STREAM:
            if flow >= len(self.connections):
                raise PerfError("a connection has one byte stream, which one task sends on")
            return ByteStreamPath(connection)
        return ConnectionPath(connection, PAYLOAD_TAG + flow)

    def __enter__(self) -> Paths:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._queues.close()


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
    told, problem = False, ""
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
                with trio.move_on_after(STREAM_PATIENCE):
                    try:
                        while True:
                            nursery.start_soon(check, await listener.accept())
                    except OSError as error:  # no descriptor is left, say
                        problem = f"it cannot accept another connection: {error}"
                nursery.cancel_scope.cancel()
    except BaseException:
        if found is not None:
            await trio.aclose_forcefully(found)
        raise
    if found is None and not told:
        return problem or f"nobody has connected to port {port} with the token"
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
