"""The anyio adapter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from socket import AddressFamily
from typing import Any

import anyio
import pytest
import trio
import trio.testing
from anyio.abc import SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.tls import TLSStream
from helpers import Certificates, pattern

import trio_ucx
from trio_ucx import mesh, testing, ucp
from trio_ucx.anyio import UCXListener, UCXStream
from trio_ucx.testing import open_connection_pair


async def test_streams(worker: ucp.Worker) -> None:
    data = pattern(500_000)
    async with (
        open_connection_pair(host="127.0.0.1", worker=worker) as pair,
        UCXStream(pair[0]) as client,
        UCXStream(pair[1]) as server,
    ):
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
    async with open_connection_pair(host="127.0.0.1", worker=worker) as pair:
        client, server = map(UCXStream, pair)
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
        assert isinstance(caught.value.__cause__, trio_ucx.UCXError)


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


async def test_unix_addresses(worker: ucp.Worker, tmp_path: Path) -> None:
    """As anyio's own Unix sockets have them."""
    path = str(tmp_path / "socket")
    [listener] = await trio_ucx.open_ucx_listeners(0, host=f"unix:{path}", worker=worker)
    async with UCXListener(listener) as server, trio_ucx.connect(listener.address, worker=worker) as connection:
        client, accepted = UCXStream(connection), UCXStream(await listener.accept())
        addresses = {
            client: {SocketAttribute.local_address: "", SocketAttribute.remote_address: path},
            accepted: {SocketAttribute.local_address: path, SocketAttribute.remote_address: ""},
            server: {SocketAttribute.local_address: path},
        }
        for resource, expected in addresses.items():
            assert isinstance(resource, (UCXStream, UCXListener))
            expected[SocketAttribute.family] = AddressFamily.AF_UNIX
            assert {key: get() for key, get in resource.extra_attributes.items()} == expected
        accepted.connection.abort()
        connection.abort()


@pytest.mark.parametrize(
    "use",
    [
        lambda: trio_ucx.open_ucx_stream("127.0.0.1", 1),
        lambda: trio_ucx.connect("127.0.0.1:1").__aenter__(),
        lambda: trio_ucx.open_ucx_listeners(0),
        lambda: trio_ucx.serve_ucx(lambda _: trio.sleep(0), 0),
        lambda: ucp.open_worker().__aenter__(),
        lambda: mesh.join(rank=0, size=1, meeting="127.0.0.1:0").__aenter__(),
        lambda: open_connection_pair().__aenter__(),
        lambda: testing.open_clogged_pair().__aenter__(),
        lambda: testing.open_peer_process(trio.sleep).__aenter__(),
    ],
)
def test_asyncio_is_refused(use: Callable[[], Awaitable[Any]]) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"works in Trio tasks only, .* anyio\.run\(\.\.\., backend='trio'\)"):
            await use()

    anyio.run(main, backend="asyncio")


async def test_a_client_is_closed_when_the_task_group_has_ended(worker: ucp.Worker) -> None:
    async with anyio.create_task_group() as ended:
        pass
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
    with trio.fail_after(20):
        async with listener, trio.open_nursery() as nursery:

            async def serve() -> None:
                with pytest.raises(RuntimeError):
                    await UCXListener(listener).serve(lambda stream: stream.aclose(), ended)

            nursery.start_soon(serve)
            # The abort may also arrive before the client's connect has returned.
            with pytest.raises((trio.BrokenResourceError, ConnectionResetError), match="aborted|gave up"):
                async with trio_ucx.connect(listener.address, worker=worker) as client:
                    await client.receive()
