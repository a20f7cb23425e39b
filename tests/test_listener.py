"""Opening, listening and serving, to the letter of Trio's: what a program gets that was written for TCP."""

from __future__ import annotations

import errno
import inspect
import socket
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from helpers import PROMPT, Stopwatch, free_port, open_peer, open_raw_pair, pattern, until

import trio_ucx
from trio_ucx import ucp


@attrs.frozen
class Names(trio.abc.HostnameResolver):
    """A name service with names of ours."""

    names: dict[str, list[str]]

    async def getaddrinfo(self, host: Any, port: Any, *_: Any, **__: Any) -> Any:
        await trio.lowlevel.checkpoint()
        name = host.decode() if isinstance(host, bytes) else host
        if name not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (ip, port, 0, 0))
            if ":" in ip
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port))
            for ip in self.names[name]
        ]

    async def getnameinfo(self, *_: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
async def names() -> dict[str, list[str]]:
    """Names that this run knows; add yours."""
    known: dict[str, list[str]] = {}
    trio.socket.set_custom_hostname_resolver(Names(known))
    return known


def missing(ours: Any, trios: Any) -> list[str]:
    """The arguments of Trio's function that ours does not take in the same way."""
    mine = inspect.signature(ours).parameters
    any_keyword = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in mine.values())
    return [
        name
        for name, parameter in inspect.signature(trios).parameters.items()
        if (mine[name].kind is not parameter.kind if name in mine else not any_keyword)
    ]


def test_functions_take_what_trio_s_take() -> None:
    assert missing(trio_ucx.serve_ucx, trio.serve_tcp) == []
    assert missing(trio_ucx.open_ucx_listeners, trio.open_tcp_listeners) == []
    assert missing(trio_ucx.open_ucx_stream, trio.open_tcp_stream) == []


@pytest.mark.parametrize("delay", [0.1, None])
async def test_address_that_does_not_answer_does_not_hold_up_the_next(
    worker: ucp.Worker, names: dict[str, list[str]], delay: float | None
) -> None:
    port = free_port()
    async with await worker.open_listener("127.0.0.2", port) as deaf:
        names["host"] = ["127.0.0.2", "127.0.0.1"]
        [listener] = await trio_ucx.open_ucx_listeners(port, host="127.0.0.1", worker=worker)
        async with listener, trio.open_nursery() as nursery:

            async def keep_silent() -> None:
                async for request in deaf:
                    (await request.accept()).abort() if delay is None else endpoints.append(await request.accept())

            endpoints: list[ucp.Endpoint] = []
            nursery.start_soon(keep_silent)
            with Stopwatch(5):  # connect_timeout is longer
                client = await trio_ucx.open_ucx_stream("host", port, worker=worker, happy_eyeballs_delay=delay)
            assert client.remote_address == ("127.0.0.1", port)
            async with client, await listener.accept() as server:
                await client.send_all(b"hello")
                assert await server.receive_some() == b"hello"
            nursery.cancel_scope.cancel()
        for endpoint in endpoints:
            endpoint.abort()


async def test_all_addresses_fail(worker: ucp.Worker, names: dict[str, list[str]]) -> None:
    names["host"] = ["127.0.0.1", "127.0.0.2", "::1"]
    port = free_port()
    with pytest.raises(OSError, match="all attempts to connect to host") as caught:
        await trio_ucx.open_ucx_stream("host", port, worker=worker, connect_timeout=3)
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert len(caught.value.__cause__.exceptions) == 3


async def test_cancelled_race_leaves_nothing(worker: ucp.Worker, names: dict[str, list[str]]) -> None:
    async with open_raw_pair(worker):
        names["host"] = ["127.0.0.1", "127.0.0.2"]
        async with await worker.open_listener("127.0.0.1", 0) as deaf:
            with trio.move_on_after(0.2) as scope, Stopwatch(0.2 + PROMPT):
                await trio_ucx.open_ucx_stream("host", deaf.address[1], worker=worker, happy_eyeballs_delay=0.05)
            assert scope.cancelled_caught


async def test_both_families_of_a_name(names: dict[str, list[str]]) -> None:
    """With the run's shared workers, of which there is one for each family."""
    names["both"] = ["127.0.0.1", "::1"]
    listeners = await trio_ucx.open_ucx_listeners(0, host="both")
    assert [listener.address[0] for listener in listeners] == ["127.0.0.1", "::1"]
    port = listeners[0].address[1]
    assert listeners[1].address[1] == port
    names["six"] = ["::1"]
    for name, ip in (("both", "127.0.0.1"), ("six", "::1")):
        async with trio_ucx.connect((name, port)) as client:
            assert client.remote_address == (ip, port)
            await client.send(b"x")
    await listeners[0].aclose()
    async with trio_ucx.connect(f"both:{port}") as client:  # the other address answers
        assert client.remote_address == ("::1", port)
    await listeners[1].aclose()


async def test_server_gets_its_port_back(worker: ucp.Worker) -> None:
    """Although the connections that it closed are in TIME_WAIT for a minute."""
    [listener] = await trio_ucx.open_ucx_listeners(free_port(), host="127.0.0.1", worker=worker)
    address = listener.address
    async with ucp.open_worker(config={"TLS": "tcp"}) as other:
        async with listener, trio_ucx.connect(address, worker=other), await listener.accept() as server:
            server.abort()  # the side that closes first keeps the address
    [again] = await trio_ucx.open_ucx_listeners(address[1], host="127.0.0.1", worker=worker)
    async with again, trio_ucx.connect(address, worker=worker) as client:
        await client.send(b"x")


async def test_errno(worker: ucp.Worker, names: dict[str, list[str]]) -> None:
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
    async with listener:
        with pytest.raises(OSError) as caught:
            await trio_ucx.open_ucx_listeners(listener.address[1], host="127.0.0.1", worker=worker)
        assert caught.value.errno == errno.EADDRINUSE
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(OSError) as caught:
            await trio_ucx.open_ucx_listeners(taken.getsockname()[1], host="127.0.0.1", worker=worker)
        assert caught.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError) as caught:
        await trio_ucx.open_ucx_listeners(0, host="198.51.100.1", worker=worker)
    assert caught.value.errno == errno.EADDRNOTAVAIL
    with pytest.raises(ConnectionRefusedError) as refused:
        await trio_ucx.open_ucx_stream("127.0.0.1", free_port(), worker=worker)
    assert refused.value.errno == errno.ECONNREFUSED
    with pytest.raises(socket.gaierror, match="nobody"):
        await trio_ucx.open_ucx_stream("nobody", 1, worker=worker)
    with pytest.raises(socket.gaierror, match="nobody"):
        await trio_ucx.open_ucx_listeners(0, host="nobody", worker=worker)


async def test_server_goes_on_after_clients_that_fail(transports: str, worker: ucp.Worker) -> None:
    """Clients that are killed at all stages, that say nothing, or nonsense: ``accept`` never raises."""
    served = set()  # sizes: those who are killed may have come through before, with another one

    async def handler(connection: trio_ucx.Connection) -> None:
        try:
            async for message in connection.messages():
                await connection.send(message)
            served.add(len(message))
        except trio.BrokenResourceError:
            pass

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(
            lambda task_status: trio_ucx.serve_ucx(
                handler, 0, host="127.0.0.1", worker=worker, connect_timeout=1, task_status=task_status
            )
        )

        async def killed(delay: float) -> None:
            async with open_peer("knock", list(listener.address), transports=transports) as peer:
                await peer.hear()
                await trio.sleep(delay)
                peer.process.kill()

        async with trio.open_nursery() as clients:
            for number in range(12):
                clients.start_soon(killed, number * 0.005)
        raw = await worker.open_endpoint(listener.address)
        await raw.tag_send(b"nonsense", 2**63)
        raw.abort()
        async with trio_ucx.connect(listener.address, worker=worker) as client:
            with trio.fail_after(20):
                await client.send(pattern(1000))
                assert await client.receive() == pattern(1000)
        await until(lambda: 1000 in served)
        nursery.cancel_scope.cancel()


async def test_server_without_file_descriptors_turns_clients_away(worker: ucp.Worker, transports: str) -> None:
    """...and takes others as soon as it has some again, which UCX by itself would not."""
    async with open_peer("tight", 50, transports=transports) as peer:
        address, _ = await peer.hear()
        descriptors = Path(f"/proc/{peer.process.pid}/fd")
        before = 0
        for _ in range(2):
            opened = []
            with pytest.raises(ConnectionRefusedError):
                while len(opened) < 50:
                    opened.append(await trio_ucx.open_ucx_stream(*address, worker=worker, connect_timeout=3))
            assert len(opened) >= 4
            for client in opened:
                await client.send(b"still there?")
                with trio.fail_after(3):
                    assert await client.receive() == b"still there?"
            before = before or len(list(descriptors.iterdir()))
            for client in opened:
                client.abort()
            most = before - 3 * 5  # for more than are opened below; a client's now and then stay open in UCX
            await until(lambda: len(list(descriptors.iterdir())) <= most)  # noqa: B023
