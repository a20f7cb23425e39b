"""UCX's data ports: other machines cannot connect, and connections that do not speak UCX's protocol do no harm.

UCX trusts peers that speak its protocol (docs/guide.md, Trust); these are not tested here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import random
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest
import trio
from attacked_server import AttackedServer, open_attacked_server
from helpers import free_port, open_pair, open_peer, until
from injected_faults import have_an_unknown_address_layout, have_no_socket_filters, miss_where_ucx_listens
from networks import Host, open_network
from samples import some_worker

import trio_ucx
from trio_ucx import ucp
from trio_ucx._native import ffi
from trio_ucx.testing import internals
from trio_ucx.ucp._quirks.data_ports import (
    MAX_EACH,
    MAX_NETWORKS,
    MAX_PEERS,
    THIS_MACHINE,
    DataPorts,
    _Port,
    filter_program,
)

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


def begin(address: tuple[str, int], data: bytes = b"", timeout: float = 60) -> socket.socket:
    connection = socket.create_connection(address, timeout=timeout)
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


@pytest.mark.sample(1)
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


@pytest.mark.full
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
                    connections.append(begin(port, timeout=5))
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


SWEEP = """
import json, select, socket, sys, time

host, low, high, seconds = sys.argv[1], *map(int, sys.argv[2:5])
poller, pending, tries, connected = select.epoll(), {}, 0, []
end = time.monotonic() + seconds
while time.monotonic() < end:
    for port in range(low, high + 1):
        one = socket.socket()
        one.setblocking(False)
        tries += 1
        one.connect_ex((host, port))
        pending[one.fileno()] = one, port
        poller.register(one, select.EPOLLOUT)
    wait = time.monotonic() + 0.002
    while (left := wait - time.monotonic()) > 0:
        for fd, _ in poller.poll(left):
            one, port = pending.pop(fd)
            poller.unregister(fd)
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                one.sendall(bytes.fromhex("78563412bebafeca") + bytes(37))
                connected.append(port)
            one.close()
    for fd in list(pending):
        pending.pop(fd)[0].close()
print(json.dumps([tries, sorted(set(connected))]))
"""


async def test_no_stranger_gets_in_between(rounds: Callable[[int, int], int]) -> None:
    """A stranger tries a server's ports all the time, while each of its connections gets a worker of its own.

    Without the filter that is there before UCX listens, the stranger got in after some 10 seconds.
    """
    low, high, seconds = 20_000, 20_019, rounds(3, 60)
    with open_network() as network:
        serving, friend, stranger = network.host(), network.host(), network.host()
        network.cable((serving, "one", "10.213.1.1/24"), (friend, "eth", "10.213.1.2/24"))
        network.cable((serving, "two", "10.213.2.1/24"), (stranger, "eth", "10.213.2.2/24"))
        stranger.ip("route", "add", "10.213.1.0/24", "via", "10.213.2.1")
        await network.ready()
        ports = {"UCX_TCP_PORT_RANGE": f"{low}-{high}"}
        async with (
            open_peer("host", ["10.213.1.1"], {"isolate": True}, under=serving.under, **ports) as server,
            open_peer("reconnecting", seconds, under=friend.under) as client,
        ):
            [control] = await server.hear()
            await client.tell(control)
            swept: list[bytes] = []

            async def sweep(host: str) -> None:
                command = [*stranger.under, sys.executable, "-c", SWEEP, host, str(low), str(high), str(seconds)]
                swept.append((await trio.run_process(command, capture_stdout=True)).stdout)

            async with trio.open_nursery() as nursery:
                for host in ("10.213.1.1", "10.213.2.1"):
                    nursery.start_soon(sweep, host)
            [connections] = await client.hear(seconds + 60)
            await server.tell()
            await server.hear()
        assert connections
        for tries, connected in map(json.loads, swept):
            assert tries > 100 * seconds and connected == [], (tries, connected)


def is_shut(worker: ucp.Worker) -> bool:
    ports = internals(worker).data_ports
    return ports.opened is None and ports.obstacle is None


async def test_a_connection_leaves_data_ports_shut() -> None:
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker:
        assert is_shut(worker)
        async with open_pair(worker) as (client, server):
            await client.send(b"hello")
            assert await server.receive() == b"hello"
            # nor does raw use of a worker that has connections
            async with await worker.open_listener(None, 0):
                worker._open_data_ports(ELSEWHERE)
        assert is_shut(worker)


ELSEWHERE = "203.0.113.5"


async def test_raw_use_opens_data_ports() -> None:
    features = ucp.DEFAULT_FEATURES | ucp.Feature.RMA
    config = {"TLS": "tcp"}
    async with ucp.open_worker(config=config, features=features) as worker:
        with worker.context.allocate(8) as memory:
            assert memory.descriptor and worker.address
        (await worker.open_endpoint(worker.address)).abort()
        async with await worker.open_listener("127.0.0.1", 0) as listener:
            (await worker.open_endpoint(listener.address)).abort()
        assert is_shut(worker)  # all of them are of this machine
        worker._open_data_ports(ELSEWHERE)
        assert not is_shut(worker)
    async with ucp.open_worker(config=config) as worker, await worker.open_listener(None, 0):
        assert not is_shut(worker)
        with pytest.raises(PermissionError, match="a raw listener was opened, so every host"):
            await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
        with pytest.raises(PermissionError, match=r"call worker.admit\(\) before"):
            async with trio_ucx.connect(("127.0.0.1", 1), worker=worker):
                pass
        with pytest.raises(RuntimeError, match="earlier"):
            worker.admit("10.0.0.0/8")
        worker.admit("0.0.0.0/0", "::/0")
        async with open_pair(worker):
            pass


async def test_networks_that_the_user_names(caplog: pytest.LogCaptureFixture) -> None:
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker:
        for wrong in ("10.0.0.1/8", "a host", ""):
            with pytest.raises(ValueError, match=r"."):
                worker.admit(wrong)
        with pytest.raises(TypeError, match="'10.0.0.0/8'"):
            worker.admit(10)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at most 50"):
            worker.admit(*(f"10.0.{number}.0/24" for number in range(51)))
        worker.admit("10.0.0.0/8", "fd00::1")
        assert [record.levelname for record in caplog.records if "10.0.0.0/8, fd00::1" in record.message] == ["WARNING"]
        worker._open_data_ports(ELSEWHERE)
        assert is_shut(worker)
        async with open_pair(worker):
            beside = worker._open_isolated()
            assert internals(beside).data_ports.networks == internals(worker).data_ports.networks
            worker.admit("10.0.0.0/8", "11.0.0.0/8")
            assert internals(beside).data_ports.networks == internals(worker).data_ports.networks
            assert len(internals(beside).data_ports.networks) == 3


async def test_a_wrong_argument_leaves_data_ports_shut() -> None:
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
        assert is_shut(worker)


async def test_a_worker_without_tcp_has_no_data_port() -> None:
    async with ucp.open_worker(config={"TLS": "sysv,self"}) as worker:
        assert is_shut(worker)
        assert worker.address


@pytest.mark.parametrize(
    ("deny", "why"),
    [
        (have_no_socket_filters, "takes no packet filter"),
        (have_an_unknown_address_layout, "cannot read this UCX's worker address"),
        (miss_where_ucx_listens, "could not find where this UCX begins to listen"),
    ],
)
async def test_what_cannot_be_shut_gets_no_connections(
    monkeypatch: pytest.MonkeyPatch, deny: Callable[[pytest.MonkeyPatch], None], why: str
) -> None:
    deny(monkeypatch)
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker:
        with pytest.raises(PermissionError, match=why):
            await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
        with pytest.raises(PermissionError, match=why):
            async with trio_ucx.connect(("127.0.0.1", 1), worker=worker):
                pass
        async with await worker.open_endpoint(worker.address):  # raw endpoints need no filter
            pass
    for admitted in (["0.0.0.0/0", "::/0"], []):
        everywhere = {} if admitted else {"NET_DEVICES": "lo"}  # no stranger reaches the loopback device
        async with ucp.open_worker(config={"TLS": "tcp", **everywhere}) as worker:
            worker.admit(*admitted)
            if deny is have_no_socket_filters or (admitted and deny is miss_where_ucx_listens):
                async with open_pair(worker) as (client, server):
                    await client.send(b"hello")
                    assert await server.receive() == b"hello"


# ---- the filter ----


def attached_filter(fd: int) -> bytes:
    """The program that a socket has (SO_GET_FILTER, whose length counts instructions)."""
    buffer = ffi.new("char[]", 8 * 4096)
    length = ctypes.c_uint32(4096)
    got = ctypes.CDLL(None, use_errno=True).getsockopt(
        fd, socket.SOL_SOCKET, 26, ctypes.c_void_p(int(ffi.cast("uintptr_t", buffer))), ctypes.byref(length)
    )
    assert got == 0, os.strerror(ctypes.get_errno())
    return bytes(ffi.buffer(buffer, 8 * length.value))


async def test_ports_have_a_filter_before_they_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filter that C code attaches drops everything: no packet reaches UCX before Python has attached its own."""
    monkeypatch.setattr(DataPorts, "_attach", lambda ports: None)
    async with ucp.open_worker(config={"TLS": "tcp"}) as worker:
        ports = internals(worker).data_ports._ports
        assert {port.address for port in ports} <= listening(os.getpid())
        assert {port.address for port in ports} == {*worker.address.tcp_addresses}
        for port in ports:
            assert attached_filter(port.fd) == struct.pack("=HBBI", 0x06, 0, 0, 0)
            with pytest.raises(TimeoutError):
                socket.create_connection(port.address, timeout=0.2)


def some_ports() -> tuple[DataPorts, list[list[str]]]:
    """Data ports without sockets, and a list of the peers that the filter admits after each change."""
    ports = DataPorts(ffi.new("tu_data_ports_t *"), some_worker(tcp_addresses=()), None)
    ports.obstacle = None
    ports._ports = [_Port(-1, 0, socket.AF_INET, ("", 0))]
    changes: list[list[str]] = []
    ports._attach = lambda: changes.append(list(ports._peers))  # type: ignore[method-assign]
    return ports, changes


def test_admitted_peers(caplog: pytest.LogCaptureFixture) -> None:
    ports, changes = some_ports()
    ports.admit_peer(["127.0.0.1", "10.0.0.1"], "10.0.0.1")
    ports.admit_peer(["10.0.0.1"], "10.0.0.1")  # known already
    ports.admit_peer(["10.0.0.3"], None)  # by a Unix socket
    ports.admit_peer(["fd00::1"], "127.0.0.1")  # nobody can connect from there: the ports are IPv4's
    ports.admit_peer(["10.0.0.3"], "fd00::3")
    assert changes == [["10.0.0.1"], ["10.0.0.1", "10.0.0.3"]]
    assert not caplog.records
    ports.admit_peer(["192.168.0.5"], "10.0.0.9")  # by address translation: both, and nobody else
    assert set(changes[-1]) == {"10.0.0.1", "10.0.0.3", "192.168.0.5", "10.0.0.9"}
    [record] = caplog.records
    assert record.levelname == "WARNING" and "10.0.0.9" in record.message and "192.168.0.5" in record.message
    ports.admit([ip_network("10.5.0.0/16")])
    ports.admit_peer(["10.5.0.1"], "10.5.0.2")
    assert len(changes) == 4


def test_number_of_admitted_peers() -> None:
    ports, changes = some_ports()
    ports.admit_peer([f"10.1.0.{number}" for number in range(2 * MAX_EACH)], None)
    assert len(changes[-1]) == MAX_EACH
    for number in range(MAX_PEERS):
        ports.admit_peer([f"10.2.0.{number}"], None)
        ports.admit_peer(["10.1.0.0"], None)  # admitted again and again
    assert len(changes[-1]) == MAX_PEERS
    assert "10.1.0.0" in changes[-1] and "10.1.0.1" not in changes[-1]


def attach(listener: socket.socket, program: bytes) -> None:
    kept = ffi.from_buffer("char[]", program)
    value = struct.pack("@HP", len(program) // 8, int(ffi.cast("uintptr_t", kept)))
    listener.setsockopt(socket.SOL_SOCKET, 26, value)


@pytest.mark.parametrize(
    ("host", "strangers", "friends"),
    [
        ("127.0.0.1", ["128.0.0.0/1", "127.0.0.2", "127.0.1.0/24", "::/0"], ["127.0.0.0/25", "127.0.0.1", "0.0.0.0/0"]),
        ("::1", ["::2", "1::1", "::1:1", "::/128", "8000::/1", "0.0.0.0/0"], ["::1", "::/127", "::/64", "::/0"]),
    ],
)
def test_the_filter(host: str, strangers: list[str], friends: list[str]) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"not to be had here: {error}")

    def connect(timeout: float) -> socket.socket:
        return socket.create_connection(listener.getsockname()[:2], timeout=timeout)

    with listener:
        for networks in (strangers, []):
            attach(listener, filter_program(family, map(ip_network, networks)))
            with pytest.raises(TimeoutError):
                connect(0.2)
        for friend in friends:
            attach(listener, filter_program(family, map(ip_network, [*strangers, friend])))
            with connect(5) as after:
                accepted, _ = listener.accept()
                with accepted:  # a socket that was accepted has the filter, and keeps it
                    attach(listener, filter_program(family, ()))
                    after.sendall(b"x" * 100_000)
                    assert len(accepted.recv(1000, socket.MSG_WAITALL)) == 1000
        # the largest program that there can be is accepted
        prefix = "2001:db8::{:x}" if ":" in host else "10.1.2.{}"
        peers = [ip_network(prefix.format(number)) for number in range(MAX_PEERS)]
        named = [ip_network(f"2001:db8:{number:x}::/45", strict=False) for number in range(MAX_NETWORKS)]
        attach(listener, filter_program(family, [*named, *peers, *THIS_MACHINE]))
        with connect(5):
            pass


# ---- ports that are used up ----


async def test_no_port_is_left() -> None:
    """The last free port of the range is found, and then opening fails at once. (UCX alone would try for ever.)"""
    with contextlib.ExitStack() as stack:
        free = free_port()
        first = stack.enter_context(socket.create_server(("127.0.0.1", free)))
        for port in (free + 1, free + 2):
            with contextlib.suppress(OSError):  # somebody else has it
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        config = {"TLS": "tcp", "NET_DEVICES": "lo", "TCP_PORT_RANGE": f"{free}-{free + 2}"}
        with pytest.raises(OSError, match=f"TCP_PORT_RANGE={free}-{free + 2} .* here 1") as caught:
            async with ucp.open_worker(config=config):
                pass
        assert caught.value.errno == errno.EADDRINUSE
        first.close()
        async with ucp.open_worker(config=config) as worker:
            assert [port.address for port in internals(worker).data_ports._ports] == [("127.0.0.1", free)]
            [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker, isolate=True)
            async with listener:
                with pytest.raises(ConnectionRefusedError, match="no free port for UCX's TCP transport"):
                    async with trio_ucx.connect(listener.address):
                        pass
