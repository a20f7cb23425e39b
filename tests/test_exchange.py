"""Hellos: refused versions, silent clients, crowds, strangers; and what listeners promise."""

from __future__ import annotations

import random
import struct

import attrs
import pytest
import trio
import trio.testing
from helpers import Stopwatch, pattern, until

import trio_ucx
from trio_ucx import _handshake, ucp
from trio_ucx import _wire as wire


def test_hellos_survive_the_wire() -> None:
    hello = wire.Hello(
        kind=wire.OPEN,
        client_id=wire.new_connection_id(),
        service=2**63,
        window=2**40,
        threshold=65536,
        process=wire.Process(bytes(range(16)), 2**40, 1234, 2**50),
        software="trio_ucx ü",
        address=b"address" * 100,
    )
    assert wire.decode_hello(hello.encode()) == hello
    welcome = attrs.evolve(hello, kind=wire.WELCOME, server_id=wire.new_connection_id(), address=b"")
    assert wire.decode_hello(welcome.encode()) == welcome
    refusal = wire.Refusal(hello.client_id, "no")
    assert wire.decode_hello(refusal.encode()) == refusal
    newer = bytearray(hello.encode())
    struct.pack_into("<H", newer, 8, 99)
    assert wire.decode_hello(bytes(newer)) == wire.UnknownVersion(99, hello.client_id, hello.address)


def test_nonsense_is_no_hello() -> None:
    chance = random.Random(1)
    good = wire.Hello(wire.OPEN, wire.new_connection_id(), window=1, address=b"x" * 20).encode()
    for data in [b"", b"trio_ucx", good[:-200], good[:40], b"x" * 100, good.replace(b"trio_ucx", b"trio_ucy")]:
        with pytest.raises(wire.ProtocolError):
            wire.decode_hello(data)
    for _ in range(5000):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            wire.decode_hello(bytes(data[: chance.randrange(len(data) + 1)]))
        except wire.ProtocolError:
            pass


@pytest.mark.parametrize(
    "frame",
    [
        wire.Grant(7, 2**40),
        wire.Stalled(),
        wire.Admit(2**31, 5),
        wire.Goodbye(),
        wire.Done(),
        wire.GoodbyeAck(),
        wire.Abort(),
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_frames_survive_the_wire(frame: wire.Frame) -> None:
    data = wire.encode_frame(frame)
    assert len(data) <= wire.MAX_FRAME
    assert wire.decode_frame(data) == frame
    for bad in (b"", data + b"x", b"\xff" + data[1:]):
        with pytest.raises(wire.ProtocolError):
            wire.decode_frame(bad)


@pytest.mark.parametrize("by", ["socket_address", "worker_address"])
async def test_unknown_version_is_refused_by_name(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
    async with listener:
        target = listener.address if by == "socket_address" else listener.worker_address
        encode = wire.Hello.encode

        def newer(hello: wire.Hello) -> bytes:
            data = bytearray(encode(hello))
            struct.pack_into("<H", data, 8, 99)
            return bytes(data)

        with monkeypatch.context() as patch:
            patch.setattr(wire.Hello, "encode", newer)
            with Stopwatch(5), pytest.raises(ConnectionRefusedError, match="version 99 .* speaks 2 .*UCX"):
                async with trio_ucx.connect(target, worker=worker):
                    pass
        async with trio_ucx.connect(target, worker=worker):
            server = await listener.accept()
        await server.aclose()
        assert listener.statistics().refused >= (1 if by == "socket_address" else 0)
        with trio.fail_after(10):
            while worker.statistics().endpoints:
                await trio.sleep(0.01)


async def test_client_that_says_nothing_or_nonsense_is_turned_away(worker: ucp.Worker) -> None:
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker, connect_timeout=0.3)
    async with listener:
        silent = await worker.open_endpoint(listener.address)
        await silent.tag_send(b"not a hello", 1)
        rude = await worker.open_endpoint(listener.address)
        await _handshake.send_hello(rude._core, b"nonsense" * 10, reply=True)
        with trio.fail_after(10):
            while rude.alive or silent.alive:
                await trio.sleep(0.01)
        assert listener.statistics() == trio_ucx.ListenerStatistics(0, 0, 0, 2)
        rude.abort()
        silent.abort()
        assert await worker.tag_receive(bytearray(20), 1) == (11, 1)


async def test_crowd_beyond_the_backlog_is_turned_away(worker: ucp.Worker) -> None:
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker, backlog=3)
    async with listener:
        opened, refused = [], []

        async def client() -> None:
            try:
                opened.append(await trio_ucx.open_ucx_stream(*listener.address, worker=worker, connect_timeout=3))
            except OSError as error:
                refused.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(client)
        assert len(opened) == 3
        assert all(isinstance(error, ConnectionRefusedError) for error in refused), refused
        with pytest.raises(ConnectionRefusedError, match="too many clients"):
            await trio_ucx.connect(listener.worker_address, worker=worker).__aenter__()
        servers = [await listener.accept() for _ in range(3)]
        again = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
        servers.append(await listener.accept())
        for connection in (*opened, *servers, again):
            connection.abort()


async def test_hellos_advance_without_anybody_accepting(worker: ucp.Worker) -> None:
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
    async with listener:
        clients = [await trio_ucx.open_ucx_stream(*listener.address, worker=worker) for _ in range(5)]
        for number, client in enumerate(clients):
            await client.send(bytes([number]))
        await until(lambda: listener.statistics().waiting == 5)
        for _ in clients:
            with trio.move_on_after(0):
                await listener.accept()
        assert listener.statistics().waiting == 5
        for _ in clients:
            server = await listener.accept()
            number = (await server.receive())[0]
            assert server.remote_address == clients[number].local_address
            server.abort()
            clients[number].abort()
        assert listener.statistics().accepted == 5


async def test_listeners_on_one_worker_are_told_apart(worker: ucp.Worker) -> None:
    listeners = [(await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker))[0] for _ in range(2)]
    for listener in listeners:
        copied = ucp.WorkerAddress(bytes(listener.worker_address))
        async with trio_ucx.connect(copied, worker=worker):
            with trio.fail_after(10):
                server = await listener.accept()
        await server.aclose()
    with pytest.raises(ConnectionRefusedError, match="2 listeners"):
        await trio_ucx.connect(worker.address, worker=worker).__aenter__()
    await listeners[0].aclose()
    with pytest.raises(ConnectionRefusedError, match="closed"):
        await trio_ucx.connect(listeners[0].worker_address, worker=worker).__aenter__()
    async with trio_ucx.connect(worker.address, worker=worker):
        server = await listeners[1].accept()
    await server.aclose()
    await listeners[1].aclose()


async def test_closing_a_listener(worker: ucp.Worker) -> None:
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
    accepted_client = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
    accepted = await listener.accept()
    waiting = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)

    async def expect_closed() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await listener.accept()

    await trio.sleep(0.05)
    async with trio.open_nursery() as nursery:
        taken = await listener.accept()
        nursery.start_soon(expect_closed)
        await trio.testing.wait_all_tasks_blocked()
        await listener.aclose()
        await listener.aclose()
    await accepted_client.send(pattern(1000))
    assert await accepted.receive() == pattern(1000)
    for connection in (accepted_client, accepted, waiting, taken):
        connection.abort()
    with pytest.raises(OSError):
        await trio_ucx.open_ucx_stream(*listener.address, worker=worker, connect_timeout=1)


async def test_raw_requests_can_be_rejected(worker: ucp.Worker) -> None:
    async with await worker.open_listener("127.0.0.1", 0) as listener:
        client = await worker.open_endpoint(listener.address)
        request = await listener.accept_request()
        request.reject()
        with pytest.raises(trio.ClosedResourceError, match="answered"):
            request.reject()
        with pytest.raises(trio.ClosedResourceError, match="answered"):
            await request.accept()
        with trio.fail_after(10), pytest.raises(trio.BrokenResourceError) as caught:
            while True:
                await client.tag_send(b"x", 1)
        assert isinstance(caught.value.__cause__, ucp.UCXError)
        assert caught.value.__cause__.status is ucp.Status.REJECTED
        client.abort()
        unanswered = await worker.open_endpoint(listener.address)
        request = await listener.accept_request()
        with pytest.warns(ResourceWarning, match="unanswered"):
            del request
        await trio.sleep(0.05)
        unanswered.abort()


async def test_serve_ucx(worker: ucp.Worker) -> None:
    class Mine(Exception):
        pass

    async def handler(connection: trio_ucx.Connection) -> None:
        message = await connection.receive()
        if message == b"fail":
            raise Mine
        if message == b"gone":
            with pytest.raises(trio.BrokenResourceError):
                await connection.receive()
            return
        connection.send_nowait(message)  # delivered by the graceful close

    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(
                lambda task_status: trio_ucx.serve_ucx(
                    handler, 0, host="127.0.0.1", worker=worker, task_status=task_status
                )
            )
            for size in (10, 100_000):
                async with trio_ucx.connect(listener.address, worker=worker) as client:
                    client.send_nowait(pattern(size))
                    assert await client.receive() == pattern(size)
            async with trio_ucx.connect(listener.address, worker=worker) as client:
                await client.send(b"gone")
                client.abort()  # a close that fails must not end the server
            await trio.sleep(0.1)
            client = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
            await client.send(b"fail")
            with pytest.raises(trio.BrokenResourceError):
                await client.receive()
            client.abort()
    assert caught.group_contains(Mine)
