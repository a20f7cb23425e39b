"""Opening, listening and serving behave as Trio's functions for TCP do."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import re
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from helpers import Certificates, echo, expect_closed, free_port, open_listener, open_peer, pattern, serving, until
from injected_faults import fail_accepts
from timing import PROMPT, Stopwatch, cancelled_after

import trio_ucx
from trio_ucx import ucp
from trio_ucx._handshake import control_stream
from trio_ucx._handshake import server as server_side
from trio_ucx._handshake.exchange import Exchange, Refused
from trio_ucx._handshake.handshake import Handshake
from trio_ucx._handshake.registry import WorkerConnections
from trio_ucx._handshake.server import RESERVED_DESCRIPTORS
from trio_ucx._link import Options
from trio_ucx._rules.wire import MAGIC, VERSION


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


@contextlib.contextmanager
def listens_with_a_full_queue(host: str, port: int) -> Iterator[None]:
    """Connecting to this address takes for ever: its queue of one connection is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(0)
        with contextlib.suppress(TimeoutError):
            while True:
                stack.enter_context(socket.create_connection((host, port), timeout=0.2))
        yield


async def test_address_that_refuses_does_not_hold_up_the_next(worker: ucp.Worker, names: dict[str, list[str]]) -> None:
    """Not even when no second attempt is made at the same time."""
    names["host"] = ["127.0.0.2", "127.0.0.1"]
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
    port = listener.address[1]
    async with listener:
        with Stopwatch():
            client = await trio_ucx.open_ucx_stream("host", port, worker=worker, happy_eyeballs_delay=None)
        assert client.remote_address == ("127.0.0.1", port)
        async with client, await listener.accept() as server:
            await client.send_all(b"hello")
            assert await server.receive_some() == b"hello"


async def test_address_that_does_not_answer_does_not_hold_up_the_next(
    worker: ucp.Worker, names: dict[str, list[str]]
) -> None:
    names["host"] = ["127.0.0.2", "127.0.0.1"]
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
    port = listener.address[1]
    async with listener:
        with listens_with_a_full_queue("127.0.0.2", port):
            with Stopwatch(0.1 + PROMPT):
                client = await trio_ucx.open_ucx_stream("host", port, worker=worker, happy_eyeballs_delay=0.1)
            async with client, await listener.accept():
                assert client.remote_address == ("127.0.0.1", port)
            with Stopwatch(0.4 + PROMPT), pytest.raises(TimeoutError) as caught:  # one attempt at a time
                await trio_ucx.open_ucx_stream(
                    "host", port, worker=worker, happy_eyeballs_delay=None, connect_timeout=0.4
                )
            assert caught.value.errno == errno.ETIMEDOUT
            assert f"host:{port}" in str(caught.value)


async def test_all_addresses_fail(worker: ucp.Worker, names: dict[str, list[str]]) -> None:
    names["host"] = ["127.0.0.1", "127.0.0.2", "::1"]
    port = free_port()
    with pytest.raises(ConnectionRefusedError, match="all attempts to connect to host") as caught:
        await trio_ucx.open_ucx_stream("host", port, worker=worker, connect_timeout=60)
    assert caught.value.errno == errno.ECONNREFUSED
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert len(caught.value.__cause__.exceptions) == 3


async def _says_so(stream: trio.SocketStream) -> None:
    await stream.send_all(b"SSH-2.0-OpenSSH_9.2\r\n")
    await stream.receive_some()


async def _hangs_up(stream: trio.SocketStream) -> None:
    pass


@pytest.mark.parametrize("program", [_says_so, _hangs_up])
@pytest.mark.parametrize("tls", [False, True], ids=["", "TLS"])
async def test_another_program_at_one_address_of_a_name(
    worker: ucp.Worker, names: dict[str, list[str]], program: Any, tls: bool, certificates: Certificates
) -> None:
    """The others are tried; and if one is a listener that lets nobody in, that is the error."""
    names["host"] = ["127.1.0.1", "127.1.0.2", "127.1.0.3"]
    ours, theirs = (certificates.client, certificates.server) if tls else (None, None)
    options: dict[str, Any] = {"worker": worker, "ssl_context": ours, "server_hostname": "localhost" if tls else None}
    async with trio.open_nursery() as nursery:
        others = await trio.open_tcp_listeners(0, host="127.1.0.1")
        nursery.start_soon(trio.serve_listeners, program, others)
        port = others[0].socket.getsockname()[1]
        with trio.fail_after(15), pytest.raises(OSError, match="host:.*listener"):
            await trio_ucx.connect(("host", port), **options)
        async with open_listener(worker, port=port, host="127.1.0.3", ssl_context=theirs):
            with trio.fail_after(15):
                async with trio_ucx.connect(("host", port), **options) as client:
                    assert client.remote_address == ("127.1.0.3", port)
        async with open_listener(worker, port=port, host="127.1.0.2", authkey=bytes(16), ssl_context=theirs):
            with trio.fail_after(15), pytest.raises(trio_ucx.NotAdmitted, match="host:"):
                await trio_ucx.connect(("host", port), **options)
        nursery.cancel_scope.cancel()


async def test_cancelled_race_leaves_nothing(worker: ucp.Worker, names: dict[str, list[str]]) -> None:
    names["host"] = ["127.0.0.1", "127.0.0.2"]
    port = free_port()
    with listens_with_a_full_queue("127.0.0.1", port), listens_with_a_full_queue("127.0.0.2", port):
        used = []
        for _ in range(3):  # the first ones open what the worker needs for any
            with cancelled_after(0.2) as scope:
                await trio_ucx.open_ucx_stream("host", port, worker=worker, happy_eyeballs_delay=0.05)
            assert scope.cancelled_caught
            used.append(len(os.listdir("/proc/self/fd")))
        assert used[1] >= used[2]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_either_family(worker: ucp.Worker, host: str) -> None:
    """One worker serves both."""
    [listener] = await trio_ucx.open_ucx_listeners(0, host=host, worker=worker)
    assert listener.address[0] == host and listener.address[1] > 0
    async with listener, trio_ucx.connect(listener.address, worker=worker) as client:
        assert client.remote_address == listener.address
        async with await listener.accept() as server:
            assert server.local_address == listener.address
            assert server.remote_address == client.local_address
            for size in (0, 1, 1000, 2**20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client.send, pattern(size, size))
                    assert await server.receive() == pattern(size, size)
    async with serving(echo, worker, host=host) as listener:  # as a string, too
        async with trio_ucx.connect(trio_ucx.format_address(listener.address), worker=worker) as client:
            await client.send(b"well?")
            assert await client.receive() == b"well?"
            assert client.remote_address == listener.address == trio_ucx.parse_address(listener.address)


async def test_every_interface(worker: ucp.Worker) -> None:
    """Without a host there is a listener for each family, at one port, with the same worker."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio_ucx.serve_ucx, echo, 0, worker=worker))
        assert sorted(listener.address[0] for listener in listeners) == ["0.0.0.0", "::"]
        assert listeners[0].address[1] == listeners[1].address[1] != 0
        port = listeners[0].address[1]
        for host in ("127.0.0.1", "127.0.0.3", "::1", "localhost"):
            async with trio_ucx.connect((host, port), worker=worker) as client:
                await client.send(host.encode())
                assert await client.receive() == host.encode()
        assert [listener.worker for listener in listeners] == [worker, worker]
        assert sum(listener.statistics().accepted for listener in listeners) == 4
        nursery.cancel_scope.cancel()


async def test_both_families_of_a_name(names: dict[str, list[str]]) -> None:
    """With the run's shared worker."""
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
    async with open_listener(worker, port=address[1]), trio_ucx.connect(address, worker=worker) as client:
        await client.send(b"x")


async def test_errno(worker: ucp.Worker, names: dict[str, list[str]]) -> None:
    """...and the message says what it was about."""
    open_listeners = partial(trio_ucx.open_ucx_listeners, worker=worker)
    [listener] = await open_listeners(0, host="127.0.0.1")
    async with listener:
        port = listener.address[1]
        with pytest.raises(OSError, match=rf"listening at 127\.0\.0\.1:{port}: Address already in use") as caught:
            await open_listeners(port, host="127.0.0.1")
        assert caught.value.errno == errno.EADDRINUSE
        with pytest.raises(OSError, match=f"listening at port {port}") as caught:
            await open_listeners(port)
        assert caught.value.errno == errno.EADDRINUSE
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(OSError) as caught:
            await open_listeners(taken.getsockname()[1], host="127.0.0.1")
        assert caught.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError, match="198.51.100.1") as caught:
        await open_listeners(0, host="198.51.100.1")
    assert caught.value.errno == errno.EADDRNOTAVAIL
    for host, label in (("127.0.0.1", "127.0.0.1"), ("::1", r"\[::1\]")):
        port = free_port()
        with pytest.raises(ConnectionRefusedError, match=f"{label}:{port}") as refused:
            await trio_ucx.open_ucx_stream(host, port, worker=worker)
        assert refused.value.errno == errno.ECONNREFUSED
    with pytest.raises(socket.gaierror, match="nobody") as unknown:
        await trio_ucx.open_ucx_stream("nobody", 1, worker=worker)
    assert unknown.value.errno == socket.EAI_NONAME
    with pytest.raises(socket.gaierror, match="nobody") as unknown:
        await open_listeners(0, host="nobody")
    assert unknown.value.errno == socket.EAI_NONAME


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

    async with serving(handler, worker, connect_timeout=60) as listener:

        async def killed(delay: float) -> None:
            async with open_peer("reconnecting_client", list(listener.address), transports=transports) as peer:
                await peer.hear()
                await trio.sleep(delay)
                peer.process.kill()

        async with trio.open_nursery() as clients:
            for number in range(12):
                clients.start_soon(killed, number * 0.005)
        for nonsense in (b"", b"nonsense", b"GET / HTTP/1.1\r\n\r\n", b"trio_ucx", bytes(100_000)):
            async with await trio.open_tcp_stream(*listener.address) as raw:
                with contextlib.suppress(trio.BrokenResourceError):
                    await raw.send_all(nonsense)
        async with await trio.open_tcp_stream(*listener.address):  # says nothing, until its time is over
            await until(lambda: listener.statistics().handshaking)
        async with trio_ucx.connect(listener.address, worker=worker) as client:
            with trio.fail_after(20):
                await client.send(pattern(1000))
                assert await client.receive() == pattern(1000)
        await until(lambda: 1000 in served)


@pytest.mark.sample(1)
async def test_server_without_file_descriptors_turns_clients_away(worker: ucp.Worker, transports: str) -> None:
    """...and takes others as soon as it has some again: of clients that aborted it keeps none."""
    async with open_peer("echo_with_few_descriptors", 50, transports=transports) as peer:
        address, _ = await peer.hear()
        descriptors = Path(f"/proc/{peer.process.pid}/fd")

        def used() -> int:
            return len(list(descriptors.iterdir()))

        async def descriptors_after_release() -> int:
            """How many it uses once those of lost clients are closed, the last a second after the others."""
            last, since = used(), trio.current_time()
            while trio.current_time() < since + 1.3:
                await trio.sleep(0.02)
                if used() != last:
                    last, since = used(), trio.current_time()
            return last

        client = await trio_ucx.open_ucx_stream(*address, worker=worker)  # UCX opens one more for the first
        await client.send(b"x")
        assert await client.receive() == b"x"
        client.abort()
        for _ in range(3):
            idle = await descriptors_after_release()
            opened = []
            with pytest.raises(ConnectionRefusedError, match="file descriptors") as caught:
                while len(opened) < 50:
                    opened.append(await trio_ucx.open_ucx_stream(*address, worker=worker, connect_timeout=60))
            assert caught.value.errno == errno.ECONNREFUSED
            assert len(opened) >= 4
            for client in opened:
                await client.send(b"still there?")
                with trio.fail_after(15):
                    assert await client.receive() == b"still there?"
            if "sm" in transports:
                assert used() <= idle + len(opened)  # a control socket each
            else:
                assert used() > idle + len(opened)  # and UCX's
            for client in opened:
                client.abort()
            await until(lambda idle=idle: used() <= idle)


async def test_silent_strangers_leave_descriptors(worker: ucp.Worker, transports: str) -> None:
    """UCX needs descriptors for the first large message of a worker, and for other clients."""
    async with open_peer("echo_with_few_descriptors", 130, transports=transports) as peer:
        address, _ = await peer.hear()
        descriptors = Path(f"/proc/{peer.process.pid}/fd")
        limit = resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE)[0]

        def left() -> int:
            return limit - len(list(descriptors.iterdir()))

        async with trio_ucx.connect(address, worker=worker) as client:
            with contextlib.ExitStack() as stack:
                for _ in range(130):
                    stack.enter_context(socket.create_connection(tuple(address), timeout=60))
                await until(lambda: left() < RESERVED_DESCRIPTORS + 40)
                for connection in (client, await trio_ucx.open_ucx_stream(*address, worker=worker)):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(connection.send, pattern(2**22))
                        with trio.fail_after(15):
                            assert await connection.receive() == pattern(2**22)
                    assert left() >= RESERVED_DESCRIPTORS
                connection.abort()


@pytest.mark.parametrize("transports", ["tcp,sm,self"], indirect=True)
async def test_many_clients_at_once(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """No client is refused, although most of them wait in the kernel's queue."""
    monkeypatch.setattr(server_side, "MAX_EXCHANGES", 3)
    monkeypatch.setattr(server_side, "GRACE", 60)
    key = b"correct horse battery staple"
    async with serving(echo, worker, authkey=key) as listener:

        async def client() -> None:
            async with trio_ucx.connect(listener.address, worker=worker, authkey=key, connect_timeout=60) as connection:
                await connection.send(b"x")
                assert await connection.receive() == b"x"

        async with trio.open_nursery() as clients:
            for _ in range(300):
                clients.start_soon(client)
        assert listener.statistics() == trio_ucx.ListenerStatistics(0, 0, 300, 0)


@attrs.define(eq=False)
class Stranger:
    """Stands for a client whose exchange is not finished."""

    source: str
    is_answered: bool = False
    is_idle: bool = True
    is_let_in: bool = False
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


def ended_first(*clients: Stranger) -> list[int]:
    """The order in which the exchanges of these clients are ended."""
    acceptor = server_side.Acceptor.__new__(server_side.Acceptor)
    acceptor._clients = dict.fromkeys(clients)  # type: ignore[arg-type]
    order = []
    while True:
        before = list(acceptor._clients)
        if not acceptor._end_idle_exchanges():
            return order
        [one] = set(before) - set(acceptor._clients)
        assert isinstance(one, Stranger) and one.scope.cancel_called
        order.append(clients.index(one))


def test_who_loses_a_place() -> None:
    assert ended_first() == []
    # First those that were not answered, then those of the source with the most strangers, then the oldest.
    assert ended_first(Stranger("a"), Stranger("a"), Stranger("a")) == [0, 1, 2]
    assert ended_first(Stranger("a", is_answered=True), Stranger("a"), Stranger("b")) == [1, 2, 0]
    assert ended_first(Stranger("a"), Stranger("b"), Stranger("b")) == [1, 0, 2]
    assert ended_first(*[Stranger("a", is_answered=True) for _ in range(3)], Stranger("b")) == [3, 0, 1, 2]
    # Only those in the first half: a source that brings ever new strangers takes no place of others.
    busy = [Stranger("b", is_idle=False) for _ in range(2)]
    assert ended_first(Stranger("a"), *busy) == []
    assert ended_first(Stranger("a", is_answered=True), Stranger("c", is_idle=False)) == []
    # A few that are not idle protect nobody.
    assert ended_first(*[Stranger(source) for source in "acdef"], *busy) == [0, 1, 2]
    # Clients that were let in are never ended, and do not count as strangers.
    inside = [Stranger("b", is_let_in=True) for _ in range(3)]
    assert ended_first(*inside, Stranger("b"), Stranger("a"), Stranger("a")) == [4, 3, 5]


async def test_when_a_client_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """When its time is over and the listener waits for it: for its bytes, or until it reads."""
    ours, its = trio.socket.socketpair()
    with its:
        stream = control_stream.ControlStream(trio.SocketStream(ours))
        client = server_side.PendingClient(stream)
        assert not client.is_idle
        monkeypatch.setattr(server_side, "GRACE", 0)
        assert client.is_idle and not client.has_sent
        await its.send(b"x")
        assert not client.is_idle
        await stream.receive_some()
        assert client.is_idle and client.has_sent and not client.is_answered
        await its.send(b"x")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, bytes(10_000_000))
            await until(lambda: stream.is_sending)
            assert client.is_idle and client.is_answered
            nursery.cancel_scope.cancel()
        stream.close()


async def test_sources(tmp_path: Path) -> None:
    """The source of a stranger."""

    async def source(family: int, own: Any, peer: Any) -> object:
        with trio.socket.socket(family) as listener, trio.socket.socket(family) as client:
            await listener.bind(own)
            listener.listen()
            if peer is not None:
                await client.bind(peer)
            await client.connect(listener.getsockname())
            accepted, _ = await listener.accept()
            with accepted:
                return control_stream.source_of(accepted)

    v4 = await source(socket.AF_INET, ("127.0.0.1", 0), ("127.0.0.9", 0))
    assert v4 == await source(socket.AF_INET, ("127.0.0.1", 0), ("127.0.0.9", 0))
    assert v4 != await source(socket.AF_INET, ("127.0.0.1", 0), ("127.0.0.8", 0))
    v6 = await source(socket.AF_INET6, ("::1", 0), None)
    assert v6 == bytes(8)  # the network
    assert await source(socket.AF_UNIX, str(tmp_path / "s"), None) == os.getuid()

    class Named:
        family = socket.AF_INET6

        def getpeername(self) -> tuple[str, int, int, int]:
            return "::ffff:127.0.0.9", 1, 0, 0

    assert control_stream.source_of(Named()) == v4  # type: ignore[arg-type]


async def test_errors_name_the_address(worker: ucp.Worker, certificates: Certificates) -> None:
    """Also if the listener is not trio_ucx's, or closes."""
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = listener.socket.getsockname()
    preamble = MAGIC + struct.pack("<HH", VERSION, 0) + bytes(32)
    reset = struct.pack("ii", 1, 0)
    async with listener:
        for options in ({}, {"authkey": b"x" * 32}, {"ssl_context": certificates.client}):
            for answer in (b"", preamble, b"HTTP/1.1 400 Bad Request\r\n\r\n"):
                for linger in (None, reset):

                    async def answer_and_leave(answer: bytes = answer, linger: bytes | None = linger) -> None:
                        async with await listener.accept() as stream:
                            with contextlib.suppress(trio.BrokenResourceError):
                                await stream.send_all(answer)
                            if linger is not None:
                                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(answer_and_leave)
                        with trio.fail_after(15), pytest.raises(OSError, match=f"127.0.0.1:{address[1]}") as e:
                            await trio_ucx.open_ucx_stream(*address, worker=worker, **options)
                        assert e.value.errno is not None


async def test_nobody_listens_there(worker: ucp.Worker, tmp_path: Path) -> None:
    for address in (f"127.0.0.1:{free_port()}", f"unix:{tmp_path}/socket"):
        with pytest.raises(OSError, match=rf"{re.escape(address)}.*; is a listener open there\?"):
            async with trio_ucx.connect(address, worker=worker):
                pass


async def test_a_lack_of_descriptors_is_logged_once(
    worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At most once a minute, however many clients are turned away."""

    def require(count: int, doing: str) -> None:
        if doing == "serving the next clients":
            raise OSError(errno.EMFILE, f"{doing} needs {count} file descriptors")

    monkeypatch.setattr(server_side.descriptors, "require", require)
    async with open_listener(worker) as listener:
        for _ in range(3):
            with trio.fail_after(15), pytest.raises(trio_ucx.ServerFull, match="running out of file descriptors"):
                await trio_ucx.connect(listener.address, worker=worker).__aenter__()
    lines = [record for record in caplog.records if "clients are turned away" in record.getMessage()]
    assert len(lines) == 1 and lines[0].levelname == "WARNING"


async def test_a_unix_socket_that_this_user_may_not_use(worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(trio, "open_unix_socket", refuse)  # root may use all
    with pytest.raises(PermissionError, match=r"unix:/x: Permission denied; the permissions of a Unix socket"):
        await trio_ucx.connect("unix:/x", worker=worker).__aenter__()


async def test_reason_of_a_listener_that_has_closed_its_socket(worker: ucp.Worker) -> None:
    """The reason arrives although nothing that the client sends arrives."""
    handshake = Handshake(WorkerConnections.of(worker), Options(), "it")
    client = Exchange(is_client=True, software="", authkey=None)
    server = Exchange(is_client=False, software="", authkey=None)
    server.receive_data(client.data_to_send())
    assert server.next_event() is None
    server.refuse("the listener closed")

    class Closed:
        async def send_all(self, data: bytes) -> None:
            raise ConnectionResetError(errno.ECONNRESET, "reset")

        async def receive_some(self) -> bytes:
            return server.data_to_send()

    assert await handshake.next_event(Closed(), client) == Refused("the listener closed")  # type: ignore[arg-type]
    handshake.close()


@pytest.mark.parametrize("why", ["the listener closed", "too many clients are waiting to be accepted"])
@pytest.mark.parametrize("moment", ["it is let in", "it waits for a place"])
async def test_reason_why_a_connecting_client_is_turned_away(worker: ucp.Worker, why: str, moment: str) -> None:
    """The listener closes, or its connect_timeout ends."""
    async with (
        open_listener(worker, backlog=1) as listener,
        trio_ucx.connect(listener.address, worker=worker, close_timeout=0) as first,
    ):
        acceptor = listener._acceptor
        await until(lambda: listener.statistics().waiting == 1)
        if why != "the listener closed":
            acceptor._timeout = 2

        async def connect() -> None:
            with pytest.raises(ConnectionRefusedError, match=f"{listener.address[1]} refused the connection: {why}"):
                await trio_ucx.open_ucx_stream(*listener.address, worker=worker)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect)
            if moment == "it is let in":
                await until(lambda: any(client.is_let_in for client in acceptor._clients))
            else:
                await until(lambda: len(acceptor._places))
            if why == "the listener closed":
                await listener.aclose()
        first.abort()


async def test_reason_why_a_client_that_is_connected_is_turned_away(
    worker: ucp.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is open, and the listener, to which its HELLO has not come yet, closes."""
    open_if_ready = Handshake._open_if_ready

    def open_client(handshake: Handshake) -> None:
        control = handshake.control
        if control is not None and control.exchange.is_client:
            open_if_ready(handshake)

    monkeypatch.setattr(Handshake, "_open_if_ready", open_client)
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
    client = await trio_ucx.open_ucx_stream(*listener.address, worker=worker)
    await listener.aclose()
    with (
        trio.fail_after(60),
        pytest.raises(trio.BrokenResourceError, match="refused the connection: the listener closed"),
    ):
        await client.receive()
    client.abort()


async def test_full_queue_of_a_unix_socket(worker: ucp.Worker, tmp_path: Path) -> None:
    """Connecting waits, as with TCP. (The kernel says EAGAIN, which Trio takes for EINPROGRESS.)"""
    path = f"{tmp_path}/socket"
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket(socket.AF_UNIX))
        full.bind(path)
        full.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect(path)
        with pytest.raises(TimeoutError, match=path):
            await trio_ucx.connect(f"unix:{path}", worker=worker, connect_timeout=0.1).__aenter__()
    async with open_listener(worker, host=f"unix:{path}", backlog=1):
        with contextlib.ExitStack() as stack:
            for _ in range(8):  # before the listener can accept any: the queue is longer than the backlog
                one = stack.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                one.connect(path)
            async with trio_ucx.connect(f"unix:{path}", worker=worker):
                pass


async def test_errors_of_accept(worker: ucp.Worker, caplog: pytest.LogCaptureFixture) -> None:
    """Transient errors are logged, and accepting goes on; any other closes the listener, and ``accept`` raises."""
    [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
    errors = [OSError(errno.EMFILE, "files"), OSError(errno.ENFILE, "files"), OSError(errno.ENOBUFS, "memory")]
    fail_accepts(listener, errors)
    async with listener:
        while errors:
            with pytest.raises(OSError):
                await trio_ucx.open_ucx_stream(*listener.address, worker=worker, connect_timeout=60)
        async with trio_ucx.connect(listener.address, worker=worker), await listener.accept():
            pass
        logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(logged) == 3 and all("trying again" in line for line in logged), logged
        errors.append(OSError(errno.EPERM, "forbidden"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_closed, listener.accept)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(OSError):
                await trio_ucx.open_ucx_stream(*listener.address, worker=worker, connect_timeout=60)
        with pytest.raises(trio.ClosedResourceError):
            await listener.accept()


async def test_isolated_connections_to_a_suspended_peer_close_together(transports: str) -> None:
    """Each needs up to half a second over TCP, because its sends do not end."""
    count = 12
    async with AsyncExitStack() as stack:
        async with AsyncExitStack() as closing:
            worker = await closing.enter_async_context(ucp.open_worker(config={"TLS": transports}))
            async with open_listener(worker, isolate=True) as listener:
                peer = await stack.enter_async_context(
                    open_peer("clients_of", listener.address, count, transports=transports)
                )
                with trio.fail_after(20):
                    connections = [await listener.accept() for _ in range(count)]
                    assert await peer.hear() == "connected"
                peer.process.send_signal(signal.SIGSTOP)
                for connection in connections:
                    connection.send_nowait(bytes(2**23), tag=1)
            with Stopwatch(2.5), pytest.warns(ResourceWarning, match="unclosed"):
                await closing.aclose()
        peer.process.send_signal(signal.SIGCONT)
