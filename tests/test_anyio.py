"""The anyio adapter."""

from __future__ import annotations

import anyio
import pytest
import trio.testing
from anyio.abc import SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.tls import TLSStream
from helpers import Certificates, pattern

import trio_ucx
from trio_ucx import ucp
from trio_ucx.anyio import UCXListener, UCXStream
from trio_ucx.testing import open_pair_over_listener


async def test_streams(worker: ucp.Worker) -> None:
    client, server = map(UCXStream, await open_pair_over_listener(worker=worker))
    data = pattern(500_000)
    async with client, server:
        async with anyio.create_task_group() as group:  # the send is over before the stream is used again
            group.start_soon(client.send, data)
            got = b""
            while len(got) < len(data):
                part = await server.receive(1000)
                assert 1 <= len(part) <= 1000
                got += part
        assert got == data
        await client.send_eof()
        with pytest.raises(anyio.EndOfStream):
            await server.receive()
        await server.send(b"header\r\nbody")
        buffered = BufferedByteReceiveStream(client)
        assert await buffered.receive_until(b"\r\n", 100) == b"header"
        assert client.extra(SocketAttribute.remote_address) == client.connection.remote_address
        assert client.extra(SocketAttribute.remote_port) == server.extra(SocketAttribute.local_port)
        assert client.extra(SocketAttribute.family) == 2


async def test_errors_are_anyio_s(worker: ucp.Worker) -> None:
    client, server = map(UCXStream, await open_pair_over_listener(worker=worker))
    async with anyio.create_task_group() as group:

        async def receive() -> None:
            with pytest.raises(anyio.ClosedResourceError):
                await client.receive()

        group.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(anyio.BusyResourceError):
            await client.receive()
        client.connection.abort()
    with pytest.raises(anyio.ClosedResourceError):
        await client.send(b"x")
    with anyio.fail_after(15), pytest.raises(anyio.BrokenResourceError) as caught:
        await server.receive()
    assert isinstance(caught.value.__cause__, ucp.UCXError)
    server.connection.abort()


async def test_listener_under_tls(worker: ucp.Worker, certificates: Certificates) -> None:
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)

    async def handler(stream: UCXStream) -> None:
        async with await TLSStream.wrap(stream, server_side=True, ssl_context=certificates.server) as tls:
            await tls.send(await tls.receive())

    async with UCXListener(listener) as server, anyio.create_task_group() as group:
        assert server.extra(SocketAttribute.local_port) == listener.address[1]
        group.start_soon(server.serve, handler)
        for _ in range(2):
            stream = UCXStream(await trio_ucx.open_ucx_stream(*listener.address, worker=worker))
            async with await TLSStream.wrap(stream, hostname="localhost", ssl_context=certificates.client) as tls:
                await tls.send(b"hello")
                assert await tls.receive() == b"hello"
        group.cancel_scope.cancel()
