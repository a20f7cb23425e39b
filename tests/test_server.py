"""A Server that drains; clients that are told why they are refused, and try again; clients that cannot end a server."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio
import trio.testing
import trustme
from helpers import free_port, open_listener, until
from timing import Stopwatch

import trio_ucx
from trio_ucx import _open, rpc, ucp

KEY, OTHER_KEY = b"k" * 16, b"o" * 16


@asynccontextmanager
async def serving(
    handler: Callable[[trio_ucx.Connection], Awaitable[object]], worker: ucp.Worker, **options: Any
) -> AsyncIterator[trio_ucx.Server]:
    """A server that returns by itself, at least when it is drained at the end."""
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            options = {"port": 0, "host": "127.0.0.1", "worker": worker, **options}
            server = await nursery.start(partial(trio_ucx.serve_ucx, handler, **options))
            yield server
            await server.drain(0)


async def echo(connection: trio_ucx.Connection) -> None:
    async for request in connection.messages():
        await connection.send(request)


# ---- drain ----


async def test_server_is_a_sequence_of_its_listeners(worker: ucp.Worker) -> None:
    async with serving(echo, worker) as server:
        [listener] = server
        assert server[0] is listener and server.listeners == (listener,) and len(server) == 1
        assert server.address == listener.address and repr(server).endswith(", serving 0 connections>")
        async with trio_ucx.connect(server.address, worker=worker) as client:
            await client.send(b"x")
            assert await client.receive() == b"x"
            [served] = server.connections
            assert not served.draining
        await until(lambda: not server.connections)


async def test_drain(worker: ucp.Worker) -> None:
    """Idle handlers see the end, those that work answer, new clients are told, and nobody is cancelled."""
    ended: list[str] = []
    working, go_on = trio.Event(), trio.Event()

    async def handler(connection: trio_ucx.Connection) -> None:
        kind = (await connection.receive()).decode()
        if kind == "work":
            working.set()
            await go_on.wait()
            assert connection.draining
            await connection.send(b"done")
        elif kind == "receive":
            with pytest.raises(trio.EndOfChannel, match="shuts down"):
                await connection.receive(tag=5)
            with pytest.raises(trio.EndOfChannel, match="shuts down"):
                connection.receive_nowait(tag=5)
        elif kind == "messages":
            async for _ in connection.messages(7):
                raise AssertionError
        else:
            assert await connection.receive_some() == b""
        ended.append(kind)

    async with serving(handler, worker, port=free_port()) as server, contextlib.AsyncExitStack() as stack:
        clients = {}
        for kind in ("work", "receive", "messages", "stream"):
            clients[kind] = await stack.enter_async_context(trio_ucx.connect(server.address, worker=worker))
            await clients[kind].send(kind.encode())
        await working.wait()
        await until(lambda: sum(each.statistics().messages_received for each in server.connections) == 4)
        drained: list[int] = []

        async def drain() -> None:
            drained.append(await server.drain(20))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain)
            await until(lambda: len(ended) == 3)
            with pytest.raises(trio_ucx.ServerDraining, match="shutting down") as caught:
                await trio_ucx.connect(server.address, worker=worker).__aenter__()
            assert caught.value.errno == errno.ECONNREFUSED and isinstance(caught.value, ConnectionRefusedError)
            assert caught.value.address == "{}:{}".format(*server.address)
            assert not drained
            go_on.set()
        assert drained == [0] and not server.connections
        assert await clients["work"].receive() == b"done"
        for client in clients.values():
            with pytest.raises(trio.EndOfChannel):
                await client.receive()
            with pytest.raises(trio_ucx.PeerClosed):
                await client.send(b"x")
    with pytest.raises(ConnectionRefusedError):  # nobody listens any more
        await trio_ucx.connect(server.address, worker=worker).__aenter__()


async def test_drain_takes_what_has_arrived(worker: ucp.Worker) -> None:
    """Messages that are there when the drain begins are received, small, large and of several tags."""
    received: list[bytes] = []
    begun, go_on = trio.Event(), trio.Event()

    async def handler(connection: trio_ucx.Connection) -> None:
        begun.set()
        await go_on.wait()
        for tag in (1, 2):
            async for message in connection.messages(tag):
                received.append(message)

    sent = [b"a", bytes(3000), bytes(200_000)]
    async with serving(handler, worker) as server:
        async with trio_ucx.connect(server.address, worker=worker) as client, trio.open_nursery() as nursery:
            for tag in (1, 2):
                for data in sent:
                    nursery.start_soon(partial(client.send, data, tag=tag))
            await begun.wait()
            [connection] = server.connections
            await until(lambda: connection.statistics().messages_received == 6)
            nursery.start_soon(server.drain, 20)
            await until(lambda: connection.draining)
            go_on.set()
    assert sorted(map(len, received)) == sorted(2 * list(map(len, sent)))


async def test_what_is_left_is_cancelled(worker: ucp.Worker, caplog: pytest.LogCaptureFixture) -> None:
    """Also a close that waits for a client which does not acknowledge it."""
    cancelled = 0
    waiting = False
    never = trio.Event()

    async def handler(connection: trio_ucx.Connection) -> None:
        nonlocal cancelled, waiting
        kind = await connection.receive()
        if kind == b"sends":
            await connection.send(bytes(2**20))  # which nobody receives
        elif kind == b"returns":
            connection.send_nowait(bytes(2**20))
            return
        waiting = True
        try:
            await never.wait()
        except trio.Cancelled:
            cancelled += 1
            raise

    async with serving(handler, worker) as server:
        kinds = (b"waits", b"sends", b"returns")
        clients = [await trio_ucx.open_ucx_stream(*server.address, worker=worker) for _ in kinds]
        for client, kind in zip(clients, kinds, strict=True):
            await client.send(kind)
        for client in clients[1:]:
            await client.wait_message()
        await until(lambda: len(server.connections) == 2 and waiting)
        with Stopwatch(0.2 + 1.0):
            assert await server.drain(0.2) == 2  # one has returned
        assert cancelled == 1 and not server.connections
        for client in clients:
            with pytest.raises(trio_ucx.PeerLost) as caught:
                await client.wait_closed()
            assert caught.value.reason == "aborted"
            client.abort()


@pytest.mark.parametrize("answers", [True, False])
async def test_drain_does_not_wait_for_clients(worker: ucp.Worker, answers: bool) -> None:
    """A handler has returned, and its client is busy. ``serve_ucx`` waits for the client, until the timeout."""

    async def handler(connection: trio_ucx.Connection) -> None:
        connection.send_nowait(bytes(2**20))
        with pytest.raises(trio.EndOfChannel):
            await connection.receive()

    with Stopwatch(10):
        async with serving(handler, worker, close_timeout=20) as server:
            client = await trio_ucx.open_ucx_stream(*server.address, worker=worker)
            await client.wait_message()
            with Stopwatch(0.5):
                assert await server.drain(15 if answers else 3) == 0
            assert not server.connections and server._running
            if answers:
                assert await client.receive() == bytes(2**20)
                with pytest.raises(trio.EndOfChannel):
                    await client.receive()
            else:
                with pytest.raises(trio_ucx.PeerLost) as caught:
                    await client.wait_closed()
                assert caught.value.reason == "aborted"
            await until(lambda: not server._running)
            client.abort()


async def test_drain_again_and_cancelled(worker: ucp.Worker) -> None:
    async def handler(connection: trio_ucx.Connection) -> None:
        await trio.sleep_forever()

    async with serving(handler, worker) as server:
        client = await trio_ucx.open_ucx_stream(*server.address, worker=worker)
        await until(lambda: server.connections)
        with trio.move_on_after(0.02) as scope:
            await server.drain()
        assert scope.cancelled_caught and server.connections
        with pytest.raises(trio_ucx.ServerDraining):
            await trio_ucx.connect(server.address, worker=worker).__aenter__()
        counts: list[int] = []

        async def drain(timeout: float) -> None:
            counts.append(await server.drain(timeout))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain, 10)
            nursery.start_soon(drain, 0.05)
        assert sorted(counts) == [0, 1] and await server.drain(1) == 0
        client.abort()
    for wrong, error in ((-1, ValueError), ("1", TypeError)):
        with pytest.raises(error, match="timeout"):
            await server.drain(wrong)  # type: ignore[arg-type]


class Admin(rpc.Service):
    def __init__(self, drain: Callable[[], Awaitable[int]]) -> None:
        self.drain = drain

    @rpc.method
    async def shut_down(self, call: rpc.Call) -> int:
        return await self.drain()


@pytest.mark.parametrize("how", ["handler", "nursery", "answering", "rpc"])
async def test_a_handler_drains(how: str, worker: ucp.Worker) -> None:
    """It waits for the others, cancels those that take too long, and answers; then the server returns."""
    cancelled = trio.Event()

    async def drain() -> int:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            result = await server.drain(0.2)
            nursery.cancel_scope.cancel()
        return result

    async def answer(request: bytes) -> bytes:
        return b"%d" % await (drain() if how == "nursery" else server.drain(0.2))

    async def handler(connection: trio_ucx.Connection) -> None:
        if await connection.receive() == b"busy":
            try:
                await trio.sleep_forever()
            finally:
                cancelled.set()
        if how in ("answering", "rpc"):
            await (trio_ucx.answering(answer) if how == "answering" else rpc.serving(Admin(drain)))(connection)
        else:
            await connection.send(await answer(b""))

    async with serving(handler, worker) as server:
        async with trio_ucx.connect(server.address, worker=worker) as busy:
            await busy.send(b"busy")
            async with trio_ucx.connect(server.address, worker=worker) as client:
                await client.send(b"shut down")
                if how == "answering":
                    assert await client.request(b"") == b"1"
                elif how == "rpc":
                    assert await rpc.Client(client).call("shut_down") == 1
                else:
                    assert await client.receive() == b"1"
            assert cancelled.is_set()
            busy.abort()
        await until(lambda: not server._running)
        assert not server._tasks and not server._drainers


async def test_handlers_that_drain_at_once_do_not_wait_for_each_other(worker: ucp.Worker) -> None:
    """A drain from elsewhere waits for them, and so does a task that a handler starts in a nursery of others."""
    names = ["first", "second", "elsewhere"]
    drained: list[str] = []
    begin, go_on = trio.Event(), trio.Event()

    async def drain(name: str) -> None:
        assert await server.drain() == 0
        drained.append(name)

    async def handler(connection: trio_ucx.Connection) -> None:
        name = names.pop()
        await begin.wait()
        if name == "elsewhere":
            nursery.start_soon(drain, name)
        else:
            await drain(name)
        await go_on.wait()

    async with serving(handler, worker) as server, trio.open_nursery() as nursery:
        clients = [await trio_ucx.open_ucx_stream(*server.address, worker=worker) for _ in range(3)]
        await until(lambda: not names)
        begin.set()
        await until(lambda: server.statistics().drains == 3)
        await trio.testing.wait_all_tasks_blocked()
        assert not drained
        go_on.set()
        await until(lambda: len(drained) == 3)
        for client in clients:
            client.abort()
    assert drained[-1] == "elsewhere"


async def test_clients_in_the_middle_of_their_handshake(worker: ucp.Worker) -> None:
    """Those with a place are served; those that wait for one are told."""
    served = trio.Event()

    async def handler(connection: trio_ucx.Connection) -> None:
        served.set()
        await connection.receive()

    ends: list[type[BaseException]] = []

    async def connect(address: tuple[str, int]) -> None:
        try:
            async with trio_ucx.connect(address, worker=worker):
                pass
            ends.append(trio_ucx.Connection)  # type: ignore[arg-type]
        except OSError as error:
            ends.append(type(error))

    async with open_listener(worker, backlog=1) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(connect, listener.address)
        await until(lambda: listener.statistics().waiting == 1)
        nursery.start_soon(connect, listener.address)
        await until(lambda: listener.statistics().handshaking == 1)
        await trio.sleep(0.02)
        listener._acceptor.drain()
        await until(lambda: trio_ucx.ServerDraining in ends)
        async with await listener.accept():
            pass
    assert len(ends) == 2 and set(ends) == {trio_ucx.ServerDraining, trio_ucx.Connection}


@pytest.mark.parametrize("number", range(5))
async def test_a_client_is_never_between_two_states(worker: ucp.Worker, number: int) -> None:
    """Until its handler can begin, the listener is not settled, or a drain would end before. (Trio's order varies.)"""
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
    settled: list[bool] = []
    accepted = trio.Event()

    async def accept() -> None:
        async with await listener.accept():
            accepted.set()

    async with listener, trio_ucx.connect(listener.address, worker=worker), trio.open_nursery() as nursery:
        await until(lambda: listener.statistics().waiting == 1)
        nursery.start_soon(accept)
        while not accepted.is_set():
            settled.append(listener._acceptor.settled)
            await trio.lowlevel.checkpoint()
    assert not any(settled)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals(worker: ucp.Worker, caplog: pytest.LogCaptureFixture, number: signal.Signals) -> None:
    """The first signal drains all servers that want it; the second one cancels what is left."""
    caplog.set_level(logging.INFO, "trio_ucx")
    before = signal.getsignal(number)

    stays = trio.Event()

    async def handler(connection: trio_ucx.Connection) -> None:
        assert await connection.receive() == b"stay"
        stays.set()
        await trio.sleep_forever()

    returned = 0
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:

            async def serve(task_status: trio.TaskStatus[trio_ucx.Server]) -> None:
                nonlocal returned
                await trio_ucx.serve_ucx(
                    handler, 0, host="127.0.0.1", worker=worker, drain_on_signal=15, task_status=task_status
                )
                returned += 1

            servers = [await nursery.start(serve) for _ in range(2)]
            client = await trio_ucx.open_ucx_stream(*servers[1].address, worker=worker)
            await client.send(b"stay")
            await stays.wait()
            os.kill(os.getpid(), number)
            await until(lambda: returned == 1)
            assert servers[1].connections
            os.kill(os.getpid(), number)
        client.abort()
    assert returned == 2 and signal.getsignal(number) is before
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"], caplog.text
    assert "1 handler did not end before a second signal" in caplog.records[-1].getMessage()


async def test_signals_only_in_the_main_thread(transports: str) -> None:
    async def serve() -> None:
        async with ucp.open_worker(config={"TLS": transports}) as worker:
            with pytest.raises(RuntimeError, match="only in the main thread"):
                await trio_ucx.serve_ucx(echo, 0, host="127.0.0.1", worker=worker, drain_on_signal=1)

    await trio.to_thread.run_sync(trio.run, serve)


async def test_drain_after_a_listener_was_closed(worker: ucp.Worker) -> None:
    """With connections that were not accepted perhaps."""
    async with serving(echo, worker) as server:
        clients = [await trio_ucx.open_ucx_stream(*server.address, worker=worker) for _ in range(5)]
        await server.listeners[0].aclose()
        with trio.fail_after(15):
            for client in clients:
                client.abort()
            await server.drain()


async def test_cancelled_drain_ends_with_the_last_handler(worker: ucp.Worker) -> None:
    go_on = trio.Event()

    async def handler(connection: trio_ucx.Connection) -> None:
        await go_on.wait()

    with trio.fail_after(15):
        async with trio.open_nursery() as nursery:
            server = await nursery.start(partial(trio_ucx.serve_ucx, handler, 0, host="127.0.0.1", worker=worker))
            async with trio_ucx.connect(server.address, worker=worker):
                await until(lambda: server.connections)
                with trio.move_on_after(0.01):
                    await server.drain()
                go_on.set()


async def test_handlers_in_a_nursery_of_the_user(worker: ucp.Worker) -> None:
    """``serve_ucx`` returns when they have ended."""
    go_on, returned = trio.Event(), trio.Event()

    async def handler(connection: trio_ucx.Connection) -> None:
        await go_on.wait()

    with trio.fail_after(15):
        async with trio.open_nursery() as handlers, trio.open_nursery() as nursery:

            async def serve(task_status: trio.TaskStatus[trio_ucx.Server]) -> None:
                options: dict[str, Any] = {"host": "127.0.0.1", "worker": worker, "handler_nursery": handlers}
                await trio_ucx.serve_ucx(handler, 0, task_status=task_status, **options)
                returned.set()

            server = await nursery.start(serve)
            async with trio_ucx.connect(server.address, worker=worker):
                await until(lambda: server.connections)
                await server.listeners[0].aclose()
                await trio.testing.wait_all_tasks_blocked(0.01)
                assert not returned.is_set()
                go_on.set()


async def test_closed_listener(worker: ucp.Worker) -> None:
    """The server takes no more clients, serves those that it has, and then returns."""
    async with serving(echo, worker, port=free_port()) as server:
        async with trio_ucx.connect(server.address, worker=worker) as client:
            await client.send(b"before")
            assert await client.receive() == b"before"
            await server.listeners[0].aclose()
            await client.send(b"after")
            assert await client.receive() == b"after"
            with pytest.raises(ConnectionRefusedError):
                await trio_ucx.connect(server.address, worker=worker).__aenter__()


# ---- why a client is refused ----


async def refused(address: Any, **options: Any) -> OSError:
    try:
        connection = await trio_ucx.connect(address, **options).__aenter__()
    except OSError as error:
        return error
    connection.abort()
    raise AssertionError("it was let in")


async def test_reasons_are_told_apart(worker: ucp.Worker) -> None:
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("localhost").configure_cert(server)
    tls = {"ssl_context": client, "server_hostname": "localhost"}
    cases: list[tuple[dict[str, Any], dict[str, Any], type[OSError]]] = [
        ({"authkey": KEY}, {"authkey": OTHER_KEY}, trio_ucx.NotAdmitted),
        ({"authkey": KEY}, {}, trio_ucx.NotAdmitted),
        ({}, {"authkey": KEY}, trio_ucx.NotAdmitted),
        ({"ssl_context": server}, tls, trio_ucx.NotAdmitted),  # the client does not know the authority
        ({"ssl_context": server}, {}, trio_ucx.NotAdmitted),
        ({"shared_memory": False}, {"shared_memory": True}, trio_ucx.NotAdmitted),
    ]
    for listening, connecting, kind in cases:
        async with serving(echo, worker, **listening) as listener:
            error = await refused(listener.address, worker=worker, **connecting)
            assert type(error) is kind, (listening, connecting, error)
            assert isinstance(error, trio_ucx.Error) and error.address == "{}:{}".format(*listener.address)  # type: ignore[attr-defined]
            assert str(listener.address[1]) in str(error)
    [tcp] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with tcp, trio.open_nursery() as nursery:

        async def other_protocol() -> None:
            async with await tcp.accept() as stream:
                await stream.send_all(b"SSH-2.0-OpenSSH_9.2\r\n")
                await stream.receive_some()

        nursery.start_soon(other_protocol)
        assert type(await refused(tcp.socket.getsockname(), worker=worker)) is trio_ucx.NotTrioUCX

        async def echo_bytes(stream: trio.SocketStream) -> None:
            async for data in stream:
                await stream.send_all(data)

        nursery.start_soon(trio.serve_listeners, echo_bytes, [tcp])
        for options in ({}, {"authkey": KEY}):
            error = await refused(tcp.socket.getsockname(), worker=worker, **options)
            assert type(error) is trio_ucx.NotTrioUCX and "sends back" in str(error)
        nursery.cancel_scope.cancel()


async def test_socket_that_is_connected_with_itself(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it may happen with a port that the kernel gives to clients, as long as nobody listens there."""

    async def connect_with_itself(family: socket.AddressFamily, ip: str, port: int) -> trio.SocketStream:
        own = trio.socket.socket(family)
        await own.bind((ip, port))
        await own.connect((ip, port))
        return trio.SocketStream(own)

    monkeypatch.setattr(_open, "_open_tcp_socket", connect_with_itself)
    error = await refused(("127.0.0.1", free_port()), worker=worker)
    assert isinstance(error, ConnectionRefusedError) and "nobody listens there" in str(error)


async def test_full_server(worker: ucp.Worker) -> None:
    async with open_listener(worker, backlog=1) as listener:
        first = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
        listener._acceptor._timeout = 1
        error = await refused(listener.address, worker=worker)
        assert type(error) is trio_ucx.ServerFull and "too many clients" in str(error)
        first.abort()


# ---- trying again ----


async def test_retry_waits_for_a_listener(worker: ucp.Worker) -> None:
    port = free_port()
    async with trio.open_nursery() as nursery:
        connected = trio.Event()

        async def connect() -> None:
            async with trio_ucx.connect(("127.0.0.1", port), worker=worker, retry=trio_ucx.Backoff()) as client:
                await client.send(b"x")
                assert await client.receive() == b"x"
                connected.set()

        nursery.start_soon(connect)
        await trio.sleep(0.2)
        assert not connected.is_set()
        async with serving(echo, worker, port=port):
            with trio.fail_after(10):
                await connected.wait()


async def test_retry_stops(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where it does not get better, and else at the timeout, with the last error."""
    backoff = trio_ucx.Backoff(first=0.01, timeout=0.3)
    async with serving(echo, worker, authkey=KEY) as server:
        for _ in range(2):
            with Stopwatch(0.25):
                error = await refused(server.address, worker=worker, authkey=OTHER_KEY, retry=trio_ucx.Backoff(first=9))
            assert type(error) is trio_ucx.NotAdmitted
    with Stopwatch(0.3 + 0.5):
        error = await refused(("127.0.0.1", free_port()), worker=worker, retry=backoff)
    assert type(error) is ConnectionRefusedError and "the last attempt of 0." in error.__notes__[0]
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 8:
            raise KeyError("enough")

    monkeypatch.setattr("trio_ucx._opening.backoff.trio.sleep", sleep)
    with pytest.raises(KeyError):
        backoff = trio_ucx.Backoff(first=0.1, factor=3, longest=1)
        await trio_ucx.connect(("127.0.0.1", free_port()), worker=worker, retry=backoff).__aenter__()
    for wait, longest in zip(waits, [0.1, 0.3, 0.9, 1, 1, 1, 1, 1], strict=True):
        assert longest / 2 <= wait <= longest


def test_wrong_backoffs() -> None:
    for wrong in (
        {"first": -1},
        {"longest": "2"},
        {"factor": 0.5},
        {"factor": float("nan")},
        {"timeout": float("nan")},
    ):
        with pytest.raises((TypeError, ValueError)):
            trio_ucx.Backoff(**wrong)  # type: ignore[arg-type]
    assert attrs.asdict(trio_ucx.Backoff())["first"] == 0.05
    with pytest.raises(TypeError, match="retry must be"):
        trio.run(partial(trio_ucx.open_ucx_stream, "127.0.0.1", 1, retry=3))  # type: ignore[arg-type]


# ---- a client cannot end a server ----


async def reads_a_name_first(connection: trio_ucx.Connection) -> None:
    await connection.receive(tag=1)
    await echo(connection)


async def reads_in_tasks(connection: trio_ucx.Connection) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(connection.receive, tag=1))
        nursery.start_soon(partial(connection.receive, tag=2))


async def answers(connection: trio_ucx.Connection) -> None:
    with contextlib.suppress(trio.EndOfChannel):
        await connection.receive()
    while True:
        await connection.send(b"answer")
        await trio.sleep(0)


@pytest.mark.parametrize(
    ("handler", "sends", "level", "text"),
    [
        (reads_a_name_first, None, "DEBUG", "closed the connection"),
        (reads_in_tasks, None, "DEBUG", "closed the connection"),
        (answers, None, "DEBUG", "closed the connection"),
        (echo, bytes(2000), "WARNING", "2000 bytes is too long"),
        (echo, bytes(200_000), "WARNING", "200000 bytes is too long"),
    ],
)
async def test_polite_client_does_not_end_the_server(
    worker: ucp.Worker,
    caplog: pytest.LogCaptureFixture,
    handler: Callable[[trio_ucx.Connection], Awaitable[object]],
    sends: bytes | None,
    level: str,
    text: str,
) -> None:
    caplog.set_level(logging.DEBUG, "trio_ucx")
    async with serving(handler, worker, max_message_size=1000) as server:
        for number in (1, 2):
            caplog.clear()
            async with trio_ucx.connect(server.address, worker=worker) as client:
                if sends is not None:
                    await client.send(sends)
                    with pytest.raises(trio.BrokenResourceError):
                        await client.wait_closed()
                    client.abort()
            accepted = trio_ucx.ListenerStatistics(0, 0, number, 0)
            await until(lambda accepted=accepted: server[0].statistics() == accepted and not server.connections)
            records = [each for each in caplog.records if "The handler" in each.getMessage()]
            assert len(records) == (level == "DEBUG" or number == 1)  # warnings: the first, then one a minute
            for record in records:
                assert record.levelname == level and text in record.getMessage() and __file__ in record.getMessage()


@pytest.mark.parametrize(("sends", "level"), [(b"", "INFO"), (b"request", "WARNING")])
async def test_client_that_leaves_by_force(
    worker: ucp.Worker, caplog: pytest.LogCaptureFixture, sends: bytes, level: str
) -> None:
    """It is no news if the client has sent nothing: its connect may have been cancelled."""
    caplog.set_level(logging.INFO, "trio_ucx")
    arrived = trio.Event()

    async def handler(connection: trio_ucx.Connection) -> None:
        if sends:
            assert await connection.receive() == sends
        arrived.set()
        await connection.receive()

    async with serving(handler, worker) as server:
        client = await trio_ucx.open_ucx_stream(*server.address, worker=worker)
        if sends:
            await client.send(sends)
        await arrived.wait()
        client.abort()
        await until(lambda: not server.connections)
    [record] = [each for each in caplog.records if "The handler" in each.getMessage()]
    assert record.levelname == level and __file__ in record.getMessage()


@pytest.mark.parametrize("how", ["log", "function"])
async def test_on_handler_error(worker: ucp.Worker, caplog: pytest.LogCaptureFixture, how: str) -> None:
    told: list[Any] = []

    async def handler(connection: trio_ucx.Connection) -> None:
        if await connection.receive() == b"bug":
            raise KeyError("mine")
        await connection.send(b"fine")

    on_error: Any = "log" if how == "log" else lambda *args: told.append(args)
    async with serving(handler, worker, on_handler_error=on_error) as server:
        client = await trio_ucx.open_ucx_stream(*server.address, worker=worker)
        await client.send(b"bug")
        with pytest.raises(trio_ucx.PeerLost):
            await client.receive()
        client.abort()
        async with trio_ucx.connect(server.address, worker=worker) as client:
            await client.send(b"x")
            assert await client.receive() == b"fine"
    if how == "log":
        [record] = [each for each in caplog.records if each.levelname == "ERROR"]
        assert "handler" in record.getMessage() and record.exc_info and isinstance(record.exc_info[1], KeyError)
    else:
        [(connection, error)] = told
        assert isinstance(connection, trio_ucx.Connection) and isinstance(error, KeyError)
    with pytest.raises(TypeError, match="not an async one"):
        await trio_ucx.serve_ucx(handler, 0, on_handler_error=handler)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_handler_error must be"):
        await trio_ucx.serve_ucx(handler, 0, on_handler_error="ignore")  # type: ignore[arg-type]


async def test_close_of_a_client_that_is_answered(worker: ucp.Worker) -> None:
    """The handler fails to answer a client that has closed, while a transfer from it delays the acknowledgement."""

    async def handler(connection: trio_ucx.Connection) -> None:
        buffer = bytearray(2**25)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(connection.receive_into, buffer, tag=2))
            await connection.receive(tag=1)
            while True:
                await connection.send(b"answer")
                await trio.sleep(0)

    async with serving(handler, worker) as server:
        for number in range(10):
            client = await trio_ucx.open_ucx_stream(*server.address, worker=worker)
            await client.send(b"go", tag=1)
            with trio.move_on_after(0.002 + number * 0.001):
                await client.send(bytes(2**25), tag=2)
            await client.aclose()
