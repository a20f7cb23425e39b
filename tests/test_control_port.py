"""Attacks on a listener's control port: whatever is sent there, the server survives, serves others, and logs little."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from attacked_server import open_attacked_server, turned_away
from helpers import Rounds, resident, until

from trio_ucx import ucp
from trio_ucx._handshake.exchange import Exchange
from trio_ucx._handshake.peer_description import PeerDescription, SharedMemory
from trio_ucx._handshake.server import MAX_EXCHANGES, NO_TLS
from trio_ucx._rules.wire import MAGIC, VERSION
from trio_ucx._util.process import this_host

HEAD = struct.Struct("<IB")
PREAMBLE = MAGIC + struct.pack("<HH", VERSION, 0) + bytes(32)


@pytest.fixture(params=["tcp,sm,self"])
def transports(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("needs 4096 file descriptors (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def send_and_disconnect(address: tuple[str, int], data: bytes, patience: float = 0.0) -> bytes:
    """Connects, sends the data, and returns what the server answers within so many seconds."""
    answer = b""
    with contextlib.suppress(OSError, trio.BrokenResourceError):
        async with await trio.open_tcp_stream(*address) as stream:
            await stream.send_all(data)
            if patience:
                with trio.move_on_after(patience):
                    async for chunk in stream:
                        answer += chunk
    return answer


async def all_at_once(jobs: list[Callable[[], Any]], limit: int = 64) -> None:
    limiter = trio.CapacityLimiter(limit)

    async def one(job: Callable[[], Any]) -> None:
        async with limiter:
            await job()

    async with trio.open_nursery() as nursery:
        for job in jobs:
            nursery.start_soon(one, job)
            if len(nursery.child_tasks) > 2 * limit:
                await trio.sleep(0.001)


# ---- an attacker who speaks the protocol ----


class Attacker:
    """Speaks the protocol, and sends whatever it likes in it."""

    def __init__(self, worker: ucp.Worker, elsewhere: bool) -> None:
        host = this_host()
        if elsewhere:
            host = attrs.evolve(host, process=attrs.evolve(host.process, host=bytes(range(16))))
        self.description = PeerDescription(
            connection_id=2**31 + 5,
            window=2**20,
            threshold=65536,
            wish=SharedMemory.AUTO,
            sees_local=True,
            software="attacker",
            host_name="nowhere",
            worker=worker.address._changed(
                host=host, shared_memory_kinds=frozenset(), tcp_addresses=(("127.0.0.1", 9),), features=ucp.Feature(0)
            ),
        )

    def opening(self, **of_worker: Any) -> bytes:
        exchange = Exchange(is_client=True, software="", authkey=None)
        worker = self.description.worker._changed(**of_worker)
        exchange.open(attrs.evolve(self.description, worker=worker))
        return exchange.data_to_send()


def mutated(data: bytes, chance: random.Random, most: int = 4) -> bytes:
    copy = bytearray(data)
    for _ in range(chance.randint(1, most)):
        copy[chance.randrange(len(copy))] = chance.randrange(256)
    return bytes(copy)


@pytest.fixture
async def attackers(transports: str) -> AsyncIterator[list[Attacker]]:
    async with ucp.open_worker(config={"TLS": transports}) as worker:
        yield [Attacker(worker, elsewhere) for elsewhere in (False, True)]


# ---- the attacks ----


async def test_garbage(transports: str, tmp_path: Path, attackers: list[Attacker], rounds: Rounds) -> None:
    """Random, constant, mutated and cut off."""
    chance = random.Random(5)
    opening = attackers[1].opening()
    kinds: list[Callable[[], bytes]] = [
        lambda: chance.randbytes(chance.randrange(1, 3000)),
        lambda: bytes([chance.randrange(256)]) * chance.randrange(1, 200),
        lambda: (
            struct.pack("<QB7x", chance.choice([0, 1, 64, 2**31, 2**64 - 1]), 0)
            + bytes([chance.choice([0, 0x11, 0x2F, 0x33, 0x66, 0x77, 0x99, 0xAA, 0xCC, 0xFF])]) * 64
        ),
        lambda: mutated(opening, chance),
        lambda: opening[: chance.randrange(len(opening))],
        lambda: (
            PREAMBLE + HEAD.pack(chance.choice([0, 1, 40, 2**16, 2**17, 2**32 - 1]), chance.randrange(10)) + bytes(50)
        ),
        lambda: MAGIC + chance.randbytes(chance.randrange(100)),
    ]
    async with open_attacked_server(tmp_path, transports) as server:
        with trio.fail_after(60):
            await all_at_once(
                [
                    partial(send_and_disconnect, server.address, kinds[number % len(kinds)]())
                    for number in range(rounds(3000, 10_000))
                ]
            )
        await server.assert_well()


@pytest.mark.usefixtures("many_descriptors")
async def test_half_open_connects(transports: str, tmp_path: Path) -> None:
    """Many that send nothing: the oldest of them make room for others."""
    async with open_attacked_server(tmp_path, transports) as server:
        before = server.descriptors
        silent: list[socket.socket] = []
        try:
            for number in range(2500):
                one = socket.socket()
                silent.append(one)
                one.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    one.connect(server.address)
                if number % 50 == 0:
                    await trio.sleep(0.005)
                    assert server.descriptors <= before + MAX_EXCHANGES + 60
            await server.assert_well()
            assert server.descriptors <= before + MAX_EXCHANGES + 60
            # The oldest one that is left may have reached the listener's time limit meanwhile.
            found = turned_away(server.lines(), server.began)
            assert {"too many at once"} <= found <= {"too many at once", "it sent nothing"}
        finally:
            for one in silent:
                one.close()
        await until(lambda: server.descriptors <= before + 30)
        await server.assert_well()


@pytest.mark.usefixtures("many_descriptors")
async def test_slow_clients(transports: str, tmp_path: Path, attackers: list[Attacker]) -> None:
    """They send a byte from time to time; however many there are, others can connect."""
    async with open_attacked_server(tmp_path, transports) as server:
        opening = attackers[1].opening()

        async def slow() -> None:
            with contextlib.suppress(OSError, trio.BrokenResourceError):
                async with await trio.open_tcp_stream(*server.address) as stream:
                    for at in range(4):
                        await stream.send_all(opening[at : at + 1])
                        await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            for _ in range(MAX_EXCHANGES - 20):
                nursery.start_soon(slow)
            await trio.sleep(1)
            await server.assert_well()
            nursery.cancel_scope.cancel()
        await server.assert_well()


#: What clients of other protocols send to any port, and what the log calls them.
OTHER_PROTOCOLS = {
    "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "an HTTP client"),
    "http post": (b"POST /login HTTP/1.0\r\n\r\n" + bytes(5000), "an HTTP client"),
    "http2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "an HTTP client"),
    "tls": (b"", "a TLS client, and this listener has no ssl_context"),
    "proxy": (b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n", "a proxy that sends the PROXY header"),
    "proxy v2": (b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12), "a proxy that sends the PROXY header"),
    "ssh": (b"SSH-2.0-OpenSSH_9.6\r\n", "not a trio_ucx peer"),
    "old version": (MAGIC + struct.pack("<HH", 1, 0) + bytes(60), "refused"),
}


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


async def test_clients_of_other_protocols(transports: str, tmp_path: Path) -> None:
    async with open_attacked_server(tmp_path, transports) as server:
        for what, (data, kind) in OTHER_PROTOCOLS.items():
            data = data or client_hello()
            before = len(server.lines())
            first = not any(f": {kind}: " in line for line in server.lines())
            for _ in range(20):
                answer = await send_and_disconnect(server.address, data, 60)
                if what == "old version":
                    assert b"version" in answer
                else:
                    assert answer == (NO_TLS if what == "tls" else b"")
            await until(lambda: len(server.lines()) == before + first)  # noqa: B023
            assert any(f": {kind}: " in line for line in server.lines())
        await server.assert_well(len({kind for _, kind in OTHER_PROTOCOLS.values()}))


async def test_health_checks(transports: str, tmp_path: Path) -> None:
    async with open_attacked_server(tmp_path, transports) as server:
        for number in range(1000):
            with socket.create_connection(server.address) as client:
                if number % 2:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST
            if number % 20 == 0:
                await trio.sleep(0.01)
        await server.assert_well(1)
        assert "it left without sending anything" in server.lines()[0]


async def test_many_unfinished_handshakes(transports: str, tmp_path: Path, attackers: list[Attacker]) -> None:
    """Two thousand handshakes that do not go on, each with a different worker address."""
    chance = random.Random(3)
    worker = attackers[1].description.worker
    async with open_attacked_server(tmp_path, transports) as server:
        memory = resident(server.pid)

        def opening() -> bytes:
            uid = chance.randbytes(8)
            parts = [blob[:1] + uid + blob[9:] for blob in (worker.ucx, worker.network)]
            number = int.from_bytes(uid, "little")
            return attackers[1].opening(uid=number, ucx=parts[0], network=parts[1])

        with trio.fail_after(120):
            await all_at_once([partial(send_and_disconnect, server.address, opening(), 0.02) for _ in range(2000)])
        await server.assert_well()
        assert resident(server.pid) < memory + 30 * 2**20
