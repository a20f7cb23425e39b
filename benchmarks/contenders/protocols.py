"""WebSockets and HTTP over our byte stream, and over Trio's TCP: trio-websocket, and httpx with hypercorn.

The server echoes each message of a WebSocket, and the body of each HTTP request. Only ``crowded.py`` uses this file, by
:func:`contender` and :func:`ours`: it has no CONTENDERS.
"""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import trio

import trio_ucx
from trio_ucx import ucp

from ..ends import Control, End, echo, ping
from ..jobs import Batch, Job
from . import Contender, trio_sockets
from .ours import TLS, check_transports, worker_options

LOOP = "trio"
WEBSOCKET, HTTP = Job("latency", 8, "websocket"), Job("latency", 8, "http")
NEEDS = {WEBSOCKET: "trio_websocket", HTTP: "httpx hypercorn"}
INSTALL = {WEBSOCKET: "pip install trio-websocket", HTTP: "pip install httpx 'hypercorn[trio]'"}
#: httpx needs one. It is not opened: Backend has the stream.
URL = "http://localhost/echo"


def contender(name: str, transport: str, job: Job, **options: Any) -> Contender:
    """Returns the contender for a job, over Trio's TCP unless the options say otherwise."""
    return Contender(name, transport, "protocols", (job,), NEEDS[job], INSTALL[job], {"way": job.way, **options})


def ours(name: str, transport: str, job: Job, **worker: float) -> Contender:
    """Returns the contender for a job over the byte stream of a Connection."""
    return contender(name, transport, job, tls=TLS[transport], worker=worker)


@asynccontextmanager
async def open_end(control: Control, setup: dict[str, Any]) -> AsyncIterator[End]:
    opened = open_connection if "tls" in setup["options"] else open_socket
    ends = {"websocket": open_websocket, "http": open_http_client if setup["role"] == "client" else open_http_server}
    async with opened(control, setup) as stream, ends[setup["options"]["way"]](stream, setup["role"]) as end:
        if isinstance(stream, trio_ucx.Connection):
            end.transports = check_transports(stream.endpoint, setup)
        yield end


@asynccontextmanager
async def open_socket(control: Control, setup: dict[str, Any]) -> AsyncIterator[trio.abc.HalfCloseableStream]:
    async with trio_sockets.open_end(control, setup) as end:
        assert isinstance(end, trio_sockets.StreamEnd)
        yield end.stream


@asynccontextmanager
async def open_connection(control: Control, setup: dict[str, Any]) -> AsyncIterator[trio.abc.HalfCloseableStream]:
    async with ucp.open_worker(**worker_options(setup)) as worker:
        if setup["role"] == "client":
            async with trio_ucx.connect(tuple(setup["address"]), worker=worker) as connection:
                yield connection
            return
        async with (await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker))[0] as listener:
            await control.tell({"address": listener.address})
            async with await listener.accept() as connection:
                yield connection


# ---- WebSockets ----


@asynccontextmanager
async def open_websocket(stream: Any, role: str) -> AsyncIterator[End]:
    import trio_websocket

    async with trio.open_nursery() as nursery:
        if role == "client":
            yield WebSocketEnd(await trio_websocket.wrap_client_stream(nursery, stream, "localhost", "/"))
        else:
            request = await trio_websocket.wrap_server_stream(nursery, stream)
            yield WebSocketEnd(await request.accept())
        nursery.cancel_scope.cancel()


class WebSocketEnd(End):
    def __init__(self, websocket: Any) -> None:
        super().__init__()
        self._websocket = websocket
        self._payload = b""

    def prepare(self, batch: Batch) -> None:
        self._payload = batch.payload()

    async def _receive(self) -> None:
        self.last = await self._websocket.get_message()

    async def _send_last(self) -> None:
        await self._websocket.send_message(self.last)

    async def ping(self, batch: Batch) -> list[int]:
        return await ping(partial(self._websocket.send_message, self._payload), self._receive, batch.count)

    async def echo(self, batch: Batch) -> None:
        await echo(self._send_last, self._receive, batch.count)


# ---- HTTP ----


class NetworkStream:
    """Makes a stream of Trio's an ``httpcore.AsyncNetworkStream``."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self._stream = stream
        self.aclose = stream.aclose

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with trio.fail_after(timeout or math.inf):
            return bytes(await self._stream.receive_some(max_bytes))

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with trio.fail_after(timeout or math.inf):
            await self._stream.send_all(buffer)

    def get_extra_info(self, info: str) -> None:
        """Returns None for every key: httpcore then never takes an idle connection for a closed one."""


class Backend:
    """An ``httpcore.AsyncNetworkBackend`` that returns the stream that it was given."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self._stream = NetworkStream(stream)

    async def connect_tcp(self, *args: object, **options: object) -> NetworkStream:
        return self._stream


@asynccontextmanager
async def open_http_client(stream: trio.abc.HalfCloseableStream, role: str) -> AsyncIterator[End]:
    import httpcore
    import httpx

    backend: Any = Backend(stream)
    transport: Any = httpx.AsyncHTTPTransport()
    transport._pool = httpcore.AsyncConnectionPool(network_backend=backend)  # httpx has no public way
    async with httpx.AsyncClient(transport=transport) as client:
        yield HttpClientEnd(client)


class HttpClientEnd(End):
    def __init__(self, client: Any) -> None:
        super().__init__()
        self._client = client
        self._payload = b""

    def prepare(self, batch: Batch) -> None:
        self._payload = batch.payload()

    async def _request(self) -> None:
        answer = await self._client.post(URL, content=self._payload)
        self.last = answer.raise_for_status().content

    async def ping(self, batch: Batch) -> list[int]:
        return await ping(self._request, trio.lowlevel.checkpoint_if_cancelled, batch.count)


@asynccontextmanager
async def open_http_server(stream: trio.abc.HalfCloseableStream, role: str) -> AsyncIterator[End]:
    from hypercorn.app_wrappers import ASGIWrapper
    from hypercorn.config import Config
    from hypercorn.trio.tcp_server import TCPServer
    from hypercorn.trio.worker_context import WorkerContext

    end = HttpServerEnd()
    config = Config()
    config.accesslog = config.errorlog = None
    server = TCPServer(ASGIWrapper(end.app), config, WorkerContext(None), {}, with_socket(stream))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        yield end
        nursery.cancel_scope.cancel()


def with_socket(stream: trio.abc.HalfCloseableStream) -> Any:
    """Returns the stream as hypercorn wants it: with a socket, which is asked for the addresses."""
    if isinstance(stream, trio.SocketStream):
        return stream
    assert isinstance(stream, trio_ucx.Connection)
    here, there = stream.local_address, stream.remote_address
    addresses = SimpleNamespace(family=socket.AF_INET, getsockname=lambda: here, getpeername=lambda: there)
    calls = {name: getattr(stream, name) for name in ("receive_some", "send_all", "send_eof", "aclose")}
    return SimpleNamespace(socket=addresses, **calls)


class HttpServerEnd(End):
    def __init__(self) -> None:
        super().__init__()
        self._answered = 0
        self._changed = trio.Event()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """An ASGI application that answers with the body of the request."""
        assert scope["type"] == "http"
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        self.last = body
        self._answered += 1
        self._changed.set()

    def prepare(self, batch: Batch) -> None:
        self._answered = 0

    async def echo(self, batch: Batch) -> None:
        while self._answered < batch.count:
            self._changed = trio.Event()
            await self._changed.wait()
