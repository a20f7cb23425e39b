"""Strangers at the ports of UCX's TCP transport: what it survives, and where these ports are. (What it does not survive
is in docs/guide.md, "Open ports".)"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import trio
from helpers import until
from test_door import Door, open_door

import trio_ucx
from trio_ucx import ucp

MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
CONNECTION_MANAGEMENT = 32
#: A connection request's flags, number and address, as UCX writes them.
REQUEST = bytes([1]) + bytes(8) + socket.AF_INET.to_bytes(2, "little") + b"\x30\x39\x7f\0\0\1" + bytes(8)
LISTENS = "0A"

chance = random.Random(5)


def listening(process: int) -> set[tuple[str, int]]:
    """Where a process listens over IPv4."""
    sockets = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = fields = line.split()
        if state == LISTENS and fields[9] in sockets:
            ip, port = local.split(":")
            found.add((socket.inet_ntoa(struct.pack("<I", int(ip, 16))), int(port, 16)))
    return found


def request(event: int, rest: bytes = REQUEST, length: int | None = None) -> bytes:
    body = struct.pack("<I", event) + rest
    return MAGIC + struct.pack("<BI", CONNECTION_MANAGEMENT, len(body) if length is None else length) + body


GARBAGE: dict[str, Callable[[], bytes]] = {
    "random": lambda: chance.randbytes(chance.randint(1, 300)),
    "HTTP": lambda: b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "magic number cut short": lambda: MAGIC[: chance.randint(1, 7)],
    "wrong magic number": lambda: MAGIC[:7] + b"\0" + chance.randbytes(50),
    "magic number only": lambda: MAGIC,
    "unknown events": lambda: request(chance.choice([8, 16, 255, 2**31])),
    "addresses of no family": lambda: request(1, bytes([1]) + chance.randbytes(24)),
    "lengths out of range": lambda: request(1, length=chance.choice([2**31, 2**32 - 1, 100_000])),
    "requests cut short": lambda: request(1)[: chance.randint(8, 30)],
    "requests": lambda: request(1),
}


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    # UCX says an error for every malformed request, and there shall be nothing in the log but strangers turned away.
    async with open_door(tmp_path, "tcp", UCX_LOG_LEVEL="fatal") as door:
        yield door


def data_ports(door: Door) -> list[tuple[str, int]]:
    found = listening(door.server.process.pid) - {door.address}
    assert found
    return sorted(found)


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage(door: Door, kind: str) -> None:
    await door.is_well()
    before = door.descriptors
    ports = data_ports(door)
    for number in range(150):
        with contextlib.suppress(OSError, trio.BrokenResourceError):
            async with await trio.open_tcp_stream(*ports[number % len(ports)]) as stream:
                await stream.send_all(GARBAGE[kind]())
                if number % 3 == 0:
                    await trio.sleep(0.002)
    await door.is_well()
    await until(lambda: door.descriptors <= before)


@pytest.mark.parametrize("begin", [b"", MAGIC[:5], MAGIC, request(1)[:20]], ids=["nothing", "part", "magic", "request"])
async def test_half_open_connections(door: Door, begin: bytes) -> None:
    """Each takes a descriptor for as long as it likes, and nothing else."""
    await door.is_well()
    before = door.descriptors
    ports = data_ports(door)
    async with trio.open_nursery() as nursery:
        streams: list[trio.SocketStream] = []

        async def one(number: int) -> None:
            stream = await trio.open_tcp_stream(*ports[number % len(ports)])
            streams.append(stream)
            for byte in begin:
                await stream.send_all(bytes([byte]))
                await trio.sleep(0.005)

        for number in range(400):
            nursery.start_soon(one, number)
            await trio.sleep(0.001)
    await until(lambda: door.descriptors >= before + len(streams))
    await door.is_well()
    for stream in streams:
        await stream.aclose()
    await until(lambda: door.descriptors <= before)
    await door.is_well()


async def test_devices_and_ports_can_be_chosen() -> None:
    config = {"TLS": "tcp", "NET_DEVICES": "lo", "TCP_PORT_RANGE": "42000-42999"}
    before = listening(os.getpid())
    async with ucp.open_worker(config=config) as worker:
        opened = listening(os.getpid()) - before
        assert opened and all(ip == "127.0.0.1" and 42000 <= port <= 42999 for ip, port in opened)
        [listener] = await trio_ucx.open_ucx_listeners(0, host="127.0.0.1", worker=worker)
        async with listener, trio_ucx.connect(listener.address) as client, await listener.accept() as server:
            client.send_nowait(b"x")
            assert await server.receive() == b"x"
