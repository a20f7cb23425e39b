"""UCX's data ports: other machines cannot connect, and connections that do not speak UCX's protocol do no harm.

UCX trusts peers that speak its protocol (docs/guide.md, Trust); these are not tested here.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from attacked_server import AttackedServer, open_attacked_server
from helpers import open_pair, open_peer, until
from injected_faults import have_no_socket_filters
from networks import Host, open_network

from trio_ucx import ucp
from trio_ucx._native import ffi
from trio_ucx.testing import internals
from trio_ucx.ucp._engine.data_ports import MAX_ADMITTED, MAX_EACH, DataPorts, filter_program

UCX_MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
LISTENS = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """Where a process listens, in whatever network namespace: IPv4 only."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry))
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == LISTENS and f"socket:[{inode}]" in inodes:
            host, port = local.split(":")
            found.add((socket.inet_ntoa(struct.pack("=I", int(host, 16))), int(port, 16)))
    return found


# ---- what does not speak UCX's protocol ----


def begin(address: tuple[str, int], data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(address, timeout=5)
    if data:
        connection.sendall(data)
    return connection


def half_open(address: tuple[str, int]) -> Iterator[socket.socket]:
    for number in range(2000):
        yield begin(address, UCX_MAGIC[: number % 8])


def noise(address: tuple[str, int]) -> Iterator[socket.socket]:
    dice = random.Random(1)
    openings = [b"GET / HTTP/1.1\r\n\r\n", bytes(8), b"\xff" * 8, UCX_MAGIC[:7] + b"\0", UCX_MAGIC[::-1]]
    for number in range(500):
        yield begin(address, [*openings, dice.randbytes(8)][number % 6] + dice.randbytes(dice.randrange(5000)))


def come_and_go(address: tuple[str, int]) -> Iterator[socket.socket]:
    for _ in range(3000):
        begin(address).close()
    yield begin(address)


def slow(address: tuple[str, int]) -> Iterator[socket.socket]:
    connections = [begin(address) for _ in range(50)]
    for byte in UCX_MAGIC[:7]:
        for connection in connections:
            connection.sendall(bytes([byte]))
    yield from connections


@pytest.fixture
def many_descriptors() -> Iterator[int]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 4096:
        pytest.skip("needs 4096 file descriptors (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, limits[1]))
    yield 4096
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("attack", [half_open, noise, come_and_go, slow])
async def test_local_connections_that_do_not_speak_ucx(
    tmp_path: Path, many_descriptors: int, attack: Callable[[tuple[str, int]], Iterator[socket.socket]]
) -> None:
    async with open_attacked_server(tmp_path, "tcp") as server:
        control = server.address
        [port] = [one for one in listening(server.pid) - {control} if one[0] == "127.0.0.1"]
        await server.assert_well()
        before = server.descriptors
        connections: list[socket.socket] = []

        def come() -> None:
            for connection in attack(port):
                connections.append(connection)

        try:
            await trio.to_thread.run_sync(come)
            await server.assert_well()
        finally:
            for connection in connections:
                connection.close()
        await wait_descriptors_closed(server, before)


async def wait_descriptors_closed(server: AttackedServer, descriptors: int) -> None:
    """Waits until no more descriptors are open than before. Endpoints are kept for two seconds for reuse."""
    await until(lambda: server.descriptors <= descriptors)
    await server.assert_well()


async def test_a_data_port_that_ucx_closed(tmp_path: Path) -> None:
    """UCX stops listening when it cannot accept for lack of descriptors. The listener goes on with another worker."""
    async with open_attacked_server(tmp_path, "tcp", UCX_LOG_LEVEL="fatal") as server:
        pid = server.pid
        await server.assert_well()
        [port] = [one for one in listening(pid) - {server.address} if one[0] == "127.0.0.1"]
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (server.descriptors + 10, limits[1]))
        connections = []
        with trio.fail_after(20):
            while port in listening(pid):
                with contextlib.suppress(OSError):
                    connections.append(begin(port))
                await trio.sleep(0.01)
        for connection in connections:
            connection.close()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        await server.assert_well()


# ---- who may connect ----

KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1.5).close()
    print("connected")
except TimeoutError:
    print("dropped")
"""


async def knock(host: Host, address: tuple[str, int]) -> str:
    command = [*host.under, sys.executable, "-c", KNOCK, address[0], str(address[1])]
    done = await trio.run_process(command, capture_stdout=True)
    return done.stdout.decode().strip()


async def test_only_peers_reach_the_data_ports_from_other_machines() -> None:
    with open_network() as network:
        serving, friend, connection = network.host(), network.host(), network.host()
        network.cable((serving, "one", "10.213.1.1/24"), (friend, "eth", "10.213.1.2/24"))
        network.cable((serving, "two", "10.213.2.1/24"), (connection, "eth", "10.213.2.2/24"))
        await network.ready()
        async with (
            open_peer("host", ["0.0.0.0"], {}, under=serving.under) as server,
            open_peer("visitor", {}, [1, 70_000], under=friend.under) as client,
        ):
            [control] = await server.hear()
            ports = {host: (host, port) for host, port in listening(server.process.pid) if port != control[1]}
            near, far = ports["10.213.1.1"], ports["10.213.2.1"]
            assert await knock(connection, ("10.213.2.1", control[1])) == "connected"
            assert await knock(connection, far) == "dropped"
            assert await knock(friend, near) == "dropped"
            assert await knock(serving, near) == await knock(serving, far) == "connected"
            await client.tell(["10.213.1.1", control[1]])
            kind, transports, *_ = await client.hear(40)
            assert (kind, transports) == ("connected", ["tcp"])
            assert await knock(friend, near) == "connected"
            assert await knock(connection, far) == "dropped"
            await server.tell()
            await server.hear()


async def test_a_connection_leaves_data_ports_closed() -> None:
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker:
        assert internals(worker).data_ports.restricted
        async with open_pair(worker) as (client, server):
            await client.send(b"hello")
            assert await server.receive() == b"hello"
        assert internals(worker).data_ports.restricted


async def test_raw_use_opens_data_ports() -> None:
    features = ucp.DEFAULT_FEATURES | ucp.Feature.RMA
    async with ucp.open_worker(config={"TLS": "tcp"}) as listening, ucp.open_worker(config={"TLS": "tcp"}) as calling:
        async with await listening.open_listener("127.0.0.1", 0) as listener:
            assert not internals(listening).data_ports.restricted
            assert internals(calling).data_ports.restricted
            endpoint = await calling.open_endpoint(listener.address)
            assert not internals(calling).data_ports.restricted
            endpoint.abort()
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker:
        assert worker.address
        assert not internals(worker).data_ports.restricted
    async with ucp.open_worker(config={"TLS": "tcp"}, features=features) as worker:
        with worker.context.allocate(8) as memory:
            assert internals(worker).data_ports.restricted
            assert memory.descriptor
            assert not internals(worker).data_ports.restricted


async def test_a_wrong_argument_leaves_data_ports_closed() -> None:
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker:
        for wrong in (("127.0.0.1", 70000), "no port", 5):
            with pytest.raises((TypeError, ValueError)):
                await worker.open_endpoint(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="port"):
            await worker.open_listener("127.0.0.1", 70000)
        with pytest.raises(TypeError, match="host"):
            await worker.open_listener(5, 0)  # type: ignore[arg-type]
        with pytest.raises(OSError, match=r"."):
            await worker.open_endpoint(("::1", 1))
        assert internals(worker).data_ports.restricted


async def test_a_worker_without_tcp_has_no_data_port() -> None:
    async with ucp.open_worker(config={"TLS": "sysv,self"}) as worker:
        assert not internals(worker).data_ports.restricted
        assert worker.address


async def test_a_worker_where_filters_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    have_no_socket_filters(monkeypatch)
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker:
        assert not internals(worker).data_ports.restricted
        async with open_pair(worker) as (client, server):
            await client.send(b"hello")
            assert await server.receive() == b"hello"


@contextlib.contextmanager
def some_ports() -> Iterator[tuple[DataPorts, list[tuple[str, ...]]]]:
    """Ports that do not exist, and the addresses that the filter admitted at each change."""
    ports = DataPorts(b"")
    assert not ports.restricted
    ports.restricted = True
    changes: list[tuple[str, ...]] = []
    ports._restrict = lambda: changes.append(tuple(ports._admitted))  # type: ignore[method-assign]
    yield ports, changes


def test_admitted_addresses() -> None:
    with some_ports() as (ports, changes):
        ports.admit(["127.0.0.1", "10.0.0.1"], "10.0.0.1", (1, 22))
        ports.admit(["10.0.0.1"], "10.0.0.1", (1, 22))  # known already
        ports.admit(["10.0.0.3"], None, (1, 22))  # by a Unix socket
        ports.admit(["fd00::1"], "127.0.0.1", (1, 22))
        assert changes == [("10.0.0.1",), ("10.0.0.1", "10.0.0.3"), ("10.0.0.1", "10.0.0.3", "fd00::1")]
        assert ports.restricted
        ports.admit(["10.0.0.5"], "10.0.0.9", (1, 22))  # by address translation
        assert not ports.restricted


def test_number_of_admitted_addresses() -> None:
    with some_ports() as (ports, changes):
        ports.admit([f"10.1.0.{number}" for number in range(2 * MAX_EACH)], None, (1, 22))
        assert len(changes[-1]) == MAX_EACH
        for number in range(MAX_ADMITTED):
            ports.admit([f"10.2.0.{number}"], None, (1, 22))
            ports.admit(["10.1.0.0"], None, (1, 22))  # comes again and again
        assert len(changes[-1]) == MAX_ADMITTED
        assert "10.1.0.0" in changes[-1] and "10.1.0.1" not in changes[-1]


def attach(listener: socket.socket, program: bytes) -> None:
    kept = ffi.from_buffer("char[]", program)
    value = struct.pack("@HP", len(program) // 8, int(ffi.cast("uintptr_t", kept)))
    listener.setsockopt(socket.SOL_SOCKET, 26, value)


def test_the_filter_over_ipv6() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with listener:
        before = socket.create_connection(listener.getsockname()[:2], timeout=5)
        accepted, _ = listener.accept()
        with before, accepted:
            for hosts in (["::2", "1::1", "::1:1"], []):
                attach(listener, filter_program(socket.AF_INET6, hosts))
                with pytest.raises(TimeoutError):
                    socket.create_connection(listener.getsockname()[:2], timeout=0.3)
            before.sendall(b"goes on")
            assert accepted.recv(10) == b"goes on"
        attach(listener, filter_program(socket.AF_INET6, ["::2", "::1"]))
        with socket.create_connection(listener.getsockname()[:2], timeout=5) as after:
            accepted, _ = listener.accept()
            with accepted:  # a socket that was accepted has the filter, too
                after.sendall(b"x" * 100_000)
                assert len(accepted.recv(1000, socket.MSG_WAITALL)) == 1000
    # the largest program that there can be is accepted
    with socket.create_server(("127.0.0.1", 0)) as plain:
        hosts = [f"10.{number >> 8}.{number & 255}.1" for number in range(MAX_ADMITTED + 20)]
        attach(plain, filter_program(socket.AF_INET, hosts))
        attach(plain, filter_program(socket.AF_INET, hosts))
        with socket.create_connection(plain.getsockname(), timeout=5):
            pass
