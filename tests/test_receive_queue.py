"""A local peer that is killed while it writes to a worker's shared-memory queue stops that queue for all peers."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from helpers import NETWORK, TRANSPORTS, Rounds, live_handles, open_pair, open_peer, open_raw_listener, pattern, until
from injected_faults import fail_probes, record_probes
from timing import Stopwatch

import trio_ucx
from trio_ucx import ucp
from trio_ucx._util import limits
from trio_ucx.testing import internals

#: Seconds until other connections break, and until new clients connect over shared memory.
SOON = 5.0
#: Seconds for which a peer is stopped that may go on.
SUSPENDED = 2.0
#: The transports with a queue in shared memory.
QUEUES = ["sysv", "posix"]

pytestmark = pytest.mark.cut_off


def test_time_in_which_nobody_checks_counts_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a program that was stopped would take its own slowness for a stopped queue."""
    now = 100.0
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now))
    limit = limits.RealTimeLimit(0.5)
    for passed, over in ((0.25, False), (1000.0, False), (0.25, False), (0.0, False), (0.125, True), (0.0, True)):
        now += passed
        assert limit.is_over(1.0) is over
    assert not limit.is_over(2.0)


def options(queue: str) -> dict[str, str]:
    return {"TLS": f"tcp,{queue},cma,self"}


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
async def test_probe_that_cannot_be_sent_says_nothing_about_the_queue(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with ucp.open_worker(config=options("posix")) as worker, open_pair(worker):
        fail_probes(monkeypatch, error("no memory to record it"))
        queue = internals(worker).receive_queue
        assert await queue._probe(-1) is None
        assert "cannot probe the shared-memory queue of a worker: no memory to record it" in caplog.text


class Echo:
    """A server in this process, with the connections that it accepted and how they ended."""

    def __init__(self, listener: trio_ucx.Listener) -> None:
        self.listener = listener
        self.connections: list[trio_ucx.Connection] = []
        self.errors: list[BaseException] = []

    async def handle(self, connection: trio_ucx.Connection) -> None:
        self.connections.append(connection)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._drop, connection)
                async for message in connection.messages():
                    await connection.send(message)
                nursery.cancel_scope.cancel()
        except* trio.BrokenResourceError as group:
            self.errors.extend(group.exceptions)
        except* trio.ClosedResourceError:
            pass  # the test aborted it

    async def _drop(self, connection: trio_ucx.Connection) -> None:
        async for _ in connection.messages(2):
            pass

    async def wait_errors(self, count: int) -> None:
        with Stopwatch(SOON):
            await until(lambda: len(self.errors) >= count)


@asynccontextmanager
async def open_echo(
    worker: ucp.Worker | None = None, isolate: bool = False, authkey: bytes | None = None
) -> AsyncIterator[Echo]:
    async with trio.open_nursery() as nursery:
        [listener] = await trio_ucx.open_ucx_listeners(
            0, host="127.0.0.1", worker=worker, isolate=isolate, authkey=authkey
        )
        echo = Echo(listener)
        nursery.start_soon(trio.serve_listeners, echo.handle, [listener])
        try:
            yield echo
        finally:
            nursery.cancel_scope.cancel()
            for connection in echo.connections:
                connection.abort()


async def is_answered(echo: Echo, queue: str) -> None:
    """A new client is served over shared memory."""
    async with open_peer("caller", 100, True, transports=options(queue)["TLS"]) as client:
        await client.tell(echo.listener.address)
        assert queue in await client.hear()
        await client.tell(False)
        assert await client.hear() == 100


@pytest.mark.skipif(NETWORK != "tcp", reason="a client is given TCP by a worker that has shared memory, too")
@pytest.mark.sample(1)
@pytest.mark.parametrize("queue", QUEUES)
async def test_a_client_is_killed_in_the_middle_of_writing(queue: str, caplog: pytest.LogCaptureFixture) -> None:
    transports = options(queue)["TLS"]
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ucp.open_worker(config=options(queue)))
        echo = await stack.enter_async_context(open_echo(worker))
        honest, by_tcp, bad = [
            await stack.enter_async_context(open_peer(role, *arguments, transports=transports))
            for role, arguments in (("caller", [100]), ("caller", [100, False]), ("dying_client", [queue]))
        ]
        for client, expected in (honest, queue), (by_tcp, "tcp"), (bad, queue):
            await client.tell(echo.listener.address)
            assert expected in await client.hear()
        for client in honest, by_tcp:
            await client.tell(False)
            assert await client.hear() == 100
        await honest.tell(True)  # it waits for a message
        with caplog.at_level(logging.ERROR, "trio_ucx"):
            await bad.tell()
            with Stopwatch(SOON + 2):  # and the time that the client takes to start
                await echo.wait_errors(2)
                assert await honest.hear() == "PeerLost"
                await is_answered(echo, queue)
        assert any("killed while it wrote" in str(error) for error in echo.errors)
        [record] = [each for each in caplog.records if "killed while it wrote" in each.message]
        assert "2 endpoint(s)" not in record.message, "the dead peer's own has failed before"
        assert worker.statistics().stopped_queues == 1
        assert echo.connections[-1].worker is not worker
        await by_tcp.tell(False)
        assert await by_tcp.hear() == 100, "connections over TCP go on"


@pytest.mark.sample(1)
@pytest.mark.parametrize("queue", QUEUES)
async def test_a_client_is_killed_after_its_connection_was_closed_here(queue: str) -> None:
    """It was stopped in the middle of writing. Nothing is left by which its death would be noticed, but its process."""
    transports = options(queue)["TLS"]
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ucp.open_worker(config=options(queue)))
        echo = await stack.enter_async_context(open_echo(worker))
        honest, bad = [
            await stack.enter_async_context(open_peer(role, *arguments, transports=transports))
            for role, arguments in (("caller", [100]), ("dying_client", [queue, True]))
        ]
        for client in honest, bad:
            await client.tell(echo.listener.address)
            assert queue in await client.hear()
        await bad.tell()
        await bad.stopped()
        echo.connections[1].abort()
        await honest.tell(False)
        await trio.sleep(SUSPENDED)
        assert worker.statistics().stopped_queues == 0, "a peer that is only stopped may go on"
        bad.signal(signal.SIGKILL)
        with Stopwatch(SOON, honest.process.pid) as watch:
            assert await honest.hear() == "PeerLost"
        print(f"told after {watch.seconds:.2f} s")
        await is_answered(echo, queue)
        assert worker.statistics().stopped_queues == 1


@pytest.mark.parametrize(
    ("same", "authkey"),
    [(False, None), (True, None), (False, b"secret" * 5)],
    ids=["other_worker", "same_worker", "authkey"],
)
async def test_clients_that_connect_while_the_queue_is_stopped(same: bool, authkey: bytes | None) -> None:
    """Their connect uses another worker. A connection that was open for the client already breaks, in time."""
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ucp.open_worker(config=options("sysv")))
        ours = worker if same else await stack.enter_async_context(ucp.open_worker(config=options("sysv")))
        echo = await stack.enter_async_context(open_echo(worker))
        called = await stack.enter_async_context(open_echo(worker, authkey=authkey))
        connecting = partial(
            trio_ucx.connect, called.listener.address, worker=ours, shared_memory=True, authkey=authkey
        )
        bad = await stack.enter_async_context(open_peer("dying_client", "sysv", transports=options("sysv")["TLS"]))
        await bad.tell(echo.listener.address)
        await bad.hear()
        await bad.tell()
        await bad.ended()

        async def call() -> None:
            async with connecting() as connection:
                with suppress(trio.BrokenResourceError):
                    await connection.send(b"hello")
                    assert await connection.receive() == b"hello"

        with Stopwatch(SOON), trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(call)
                    await trio.sleep(0.2)
        async with connecting() as connection:
            await connection.send(b"hello")
            assert await connection.receive() == b"hello"
        assert worker.statistics().stopped_queues == 1
        assert same or ours.statistics().stopped_queues == 0


@pytest.mark.parametrize("queue", QUEUES)
async def test_a_server_is_killed_in_the_middle_of_writing(queue: str) -> None:
    """The queue that stops is that of this program's shared worker, which is a client here."""
    transports = options(queue)["TLS"]
    async with AsyncExitStack() as stack:
        good = await stack.enter_async_context(open_peer("echo", [0], transports=transports))
        bad = await stack.enter_async_context(open_peer("dying_server", queue, transports=transports))
        worker = await stack.enter_async_context(ucp.open_worker(config=options(queue)))
        addresses = [tuple((await peer.hear())[0]) for peer in (good, bad)]
        connections = [await trio_ucx.connect(address, worker=worker).__aenter__() for address in addresses]
        for connection in connections:
            stack.callback(connection.abort)
            await connection.send(b"hello")
            assert await connection.receive() == b"hello"
        await connections[1].send(b"die", tag=1)
        for connection in reversed(connections):
            with Stopwatch(SOON), trio.fail_after(60), pytest.raises(trio.BrokenResourceError) as caught:
                await connection.receive()
            assert isinstance(caught.value.__cause__, trio_ucx.UCXError)
        assert "killed while it wrote" in str(caught.value)
        assert worker.statistics().stopped_queues == 1
        with Stopwatch(SOON, good.process.pid), trio.fail_after(60):
            async with trio_ucx.connect(addresses[0], worker=worker, shared_memory=True) as connection:
                assert connection.worker is not worker
                assert queue in {transport.name for transport in connection.endpoint.transports}
                await connection.send(b"again")
                assert await connection.receive() == b"again"


@pytest.mark.parametrize("queue", QUEUES)
async def test_raw_endpoints(queue: str) -> None:
    transports = options(queue)["TLS"]
    async with (
        ucp.open_worker(config=options(queue)) as worker,
        open_peer("raw_listener", transports=transports) as good,
        open_peer("dying_raw_peer", queue, transports=transports) as bad,
    ):
        _, address = await good.hear()
        healthy = await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(address)))
        doomed = await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(await bad.hear())))
        await healthy.flush()
        await bad.tell(bytes(worker.address).hex())
        assert await worker.tag_receive(bytearray(10), 1) == (5, 1)
        await bad.tell()
        with Stopwatch(SOON):
            await until(lambda: not healthy.alive and not doomed.alive)
        with pytest.raises(trio.BrokenResourceError, match="killed while it wrote"):
            await healthy.flush()
        with pytest.raises(trio.BrokenResourceError, match="another worker"):
            await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(address)))
        assert worker.statistics().stopped_queues == 1
        for endpoint in healthy, doomed:
            endpoint.abort()


async def test_a_worker_with_a_stopped_queue_goes_on() -> None:
    """UCX cannot be armed any more, but its other transports work: it is progressed now and then."""
    async with (
        ucp.open_worker(config=options("sysv")) as worker,
        open_echo(worker) as echo,
        open_peer("dying_client", "sysv", transports=options("sysv")["TLS"]) as bad,
    ):
        await bad.tell(echo.listener.address)
        await bad.hear()
        await bad.tell()
        await echo.wait_errors(1)
        await until(lambda: worker.statistics().stopped_queues)
        await trio.sleep(2)
        before, began = worker.statistics().progress_calls, time.monotonic()
        await trio.sleep(1)
        await until(lambda: worker.statistics().progress_calls > before + 2, within=10)
        assert worker.statistics().progress_calls - before < 100 * (time.monotonic() - began)
        async with ucp.open_worker(config={"TLS": "tcp"}) as other:
            endpoint = await other.open_endpoint(worker.address)
            with Stopwatch(SOON), trio.fail_after(60):
                await endpoint.tag_send(bytes(10), 1)
                await endpoint.flush()
            endpoint.abort()


async def test_raw_endpoints_by_socket_address_of_a_stopped_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until such an endpoint is up, nobody knows that it will use shared memory."""
    async with (
        ucp.open_worker(config=options("sysv")) as worker,
        ucp.open_worker(config=options("sysv")) as other,
        await open_raw_listener(other, worker) as there,
        await open_raw_listener(worker) as here,
    ):
        queue = internals(worker).receive_queue
        monkeypatch.setattr(queue, "stopped", True)
        with pytest.raises(trio.BrokenResourceError, match="another worker"):
            await worker.open_endpoint(there.address)
        client = await other.open_endpoint(here.address)
        with trio.fail_after(15):
            request = await here.accept_request()
        with pytest.raises(trio.BrokenResourceError, match="another worker"):
            await request.accept()
        async with ucp.open_worker(context=worker.context) as another:
            another.admit("127.0.0.1")
            (await request.accept(another)).abort()
        client.abort()
        monkeypatch.undo()


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records which queues were probed."""
    return record_probes(monkeypatch)


@pytest.mark.parametrize("raw", [False, True], ids=["connections", "raw"])
async def test_a_stopped_peer_is_not_taken_for_a_stopped_queue(raw: bool, probes: list[str]) -> None:
    """The queue of a stopped peer is full, so UCX cannot be armed. Then another peer is killed."""
    transports = "tcp,sysv,posix,cma,self"  # by name, else posix is left out
    async with (
        ucp.open_worker(config={"TLS": transports}) as worker,
        open_peer("raw_listener" if raw else "silent", transports=transports) as stopped,
        open_peer("raw_listener", transports=transports) as killed,
    ):
        where = await stopped.hear()
        async with AsyncExitStack() as stack:
            if raw:
                endpoint = await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex(where[1])))
                stack.callback(endpoint.abort)
                await endpoint.flush()  # so that messages go to the queue, and do not wait for the endpoint
            else:
                connection = await stack.enter_async_context(trio_ucx.connect(tuple(where[0]), worker=worker))
            doomed = await worker.open_endpoint(ucp.WorkerAddress(bytes.fromhex((await killed.hear())[1])))
            await doomed.flush()
            await stopped.stop()
            async with worker.open_request_group() as group:
                for _ in range(320):  # within a window, and more than a queue holds
                    group.tag_send(endpoint, bytes(2000), 1) if raw else group.send(connection, bytes(2000), tag=1)
                killed.signal(signal.SIGKILL)
                await until(lambda: not doomed.alive and len(probes) >= 2)
                await trio.sleep(2)
                assert worker.statistics().stopped_queues == 0
                stopped.resume()
            if not raw:
                await connection.aclose()
            assert worker.statistics().stopped_queues == 0
            doomed.abort()
        assert {"sysv", "posix"} <= set(probes)


async def test_a_busy_program_is_not_taken_for_a_stopped_queue(probes: list[str]) -> None:
    """Its queue is full when a peer is killed, and it does not progress for longer than the time limits of a probe."""
    transports = TRANSPORTS[1]
    async with (
        ucp.open_worker(config={"TLS": transports}) as worker,
        open_peer("numbered", 3000, 100, transports=transports) as good,
        open_peer("silent", transports=transports) as bad,
    ):
        addresses = [tuple((await peer.hear())[0]) for peer in (good, bad)]
        doomed = await trio_ucx.connect(addresses[1], worker=worker).__aenter__()
        await doomed.ping()  # then it writes no more to our queue
        async with trio_ucx.connect(addresses[0], worker=worker) as connection:
            bad.signal(signal.SIGKILL)
            time.sleep(3)
            received = 0
            async for message in connection.messages(1):
                assert message == pattern(100, received)
                received += 1
                if received % 1000 == 0:
                    time.sleep(0.3)
            assert received == 3000
            doomed.abort()
        assert worker.statistics().stopped_queues == 0


async def test_isolated_connections() -> None:
    """Each connection has a worker: a stopped one does not affect others, and each is closed with its connection."""
    transports = options("sysv")["TLS"]
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ucp.open_worker(config=options("sysv")))
        echo = await stack.enter_async_context(open_echo(worker, isolate=True))
        clients = [
            await stack.enter_async_context(open_peer(role, argument, transports=transports))
            for role, argument in (("caller", 100), ("caller", 100), ("dying_client", "sysv"))
        ]
        for client in clients:
            await client.tell(echo.listener.address)
            assert "sysv" in await client.hear()
        await until(lambda: len(echo.connections) == 3)
        assert live_handles()["worker"] == 4
        assert len({id(connection.worker) for connection in echo.connections} | {id(worker)}) == 4
        await clients[2].tell()
        await echo.wait_errors(1)
        for _ in range(2):
            for client in clients[:2]:
                await client.tell(False)
                assert await client.hear() == 100
            await is_answered(echo, "sysv")
        assert not any(connection.worker.statistics().stopped_queues for connection in echo.connections[:2])
        for connection in echo.connections:
            connection.abort()
        await until(lambda: live_handles()["worker"] <= 1)


@pytest.mark.parametrize("end", ["aclose", "refused", "listener closes", "worker closes", "run ends"])
async def test_workers_of_isolated_connections_are_closed(end: str, transports: str) -> None:
    async with ucp.open_worker(config={"TLS": transports}) as worker, ucp.open_worker(context=worker.context) as ours:
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker, isolate=True)
        connection = await trio_ucx.connect(listener.address, worker=ours).__aenter__()
        server = await listener.accept()
        assert live_handles()["worker"] == 3
        await connection.send(b"x")
        assert await server.receive() == b"x"
        if end == "aclose":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.aclose)
                nursery.start_soon(server.aclose)
        elif end == "listener closes":
            await listener.aclose()
            await connection.send(b"accepted connections are not affected")
            assert len(await server.receive()) == 37
            server.abort()
        elif end == "refused":
            with pytest.raises(OSError):
                async with trio_ucx.connect(listener.address, worker=ours, connect_timeout=0):
                    pass
            server.abort()
        elif end == "worker closes":
            await server.aclose()
        if end in ("aclose", "listener closes", "refused"):
            await until(lambda: live_handles()["worker"] <= 2)
        await listener.aclose()
        connection.abort()
        server.abort()


async def test_isolated_connections_without_descriptors(transports: str) -> None:
    """Clients for which too few descriptors are left are refused."""
    async with (
        ucp.open_worker(config={"TLS": transports}) as worker,
        open_peer("echo_with_few_descriptors", 100, True, transports=transports) as server,
    ):
        address, _ = await server.hear()
        descriptors = Path(f"/proc/{server.process.pid}/fd")
        for _ in range(2):
            connections = []
            before = len(list(descriptors.iterdir()))
            with pytest.raises(ConnectionRefusedError, match="descriptors"):
                for _ in range(10):
                    connections.append(await trio_ucx.open_ucx_stream(*address, worker=worker))
            assert connections
            for connection in connections:
                await connection.send(b"well?")
                assert await connection.receive() == b"well?"
                await connection.aclose()
            await until(lambda before=before: len(list(descriptors.iterdir())) <= before)  # the server closes them, too


async def test_isolate_is_a_bool() -> None:
    with pytest.raises(TypeError, match="isolate must be a bool, not int"):
        await trio_ucx.open_ucx_listeners(0, isolate=1)  # type: ignore[arg-type]


@pytest.mark.sample(1)
@pytest.mark.parametrize("size, isolate", [(100, False), (8000, False), (8000, True)], ids=["100", "8000", "isolated"])
async def test_clients_are_killed_at_random(size: int, isolate: bool, rounds: Rounds) -> None:
    kills = rounds(10, 30) if isolate else rounds(20, 150)
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ucp.open_worker(config={"TLS": TRANSPORTS[1]}))
        echo = await stack.enter_async_context(open_echo(worker, isolate))
        await is_answered(echo, "sysv")
        steady = await stack.enter_async_context(open_peer("steady_client", SOON, transports=TRANSPORTS[1]))
        await steady.tell(echo.listener.address)
        assert await steady.hear() == "ready"
        brood = await stack.enter_async_context(
            open_peer("killed_clients", echo.listener.address[1], size, kills, size, transports=TRANSPORTS[1])
        )
        assert await brood.hear(120) == kills
        await is_answered(echo, "sysv")
        await steady.tell()
        trips, connects, longest = await steady.hear()
        assert trips > kills
        assert longest < SOON
        stopped = worker.statistics().stopped_queues
        assert connects <= 1 + stopped, "no connection broke but by a queue that stopped"


CLOSE_WHILE_PROBED = """
import trio
from trio_ucx import ucp
from trio_ucx.testing import internals
from trio_ucx.ucp._quirks.stopped_queue import _Probe

async def main():
    async with ucp.open_worker(config={"TLS": "tcp,posix,cma,self"}) as worker:
        probe = _Probe(internals(worker), "posix")
        for _ in range(LOOKS):
            probe.look()
        probe.close()

trio.run(main)
print("closed")
"""


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_a_raw_worker_closes_while_its_queue_is_probed(looks: int) -> None:
    """In another process: UCX crashes if the probe's worker is gone when it reads that worker's request."""
    program = CLOSE_WHILE_PROBED.replace("LOOKS", str(looks))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, "closed\n"), result.stderr
