"""trio_ucx: many Connections on one worker, and a server that echoes. For :mod:`benchmarks.scale`."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

import trio_ucx
from trio_ucx import ucp

from ..ends import Control, End
from ..jobs import IDLE, Batch, Job
from ..marks import SCALE
from . import Contender
from .ours import TLS, check_transports, worker_options

LOOP = "trio"
TAG = 1
#: Connections that are being made at the same time.
CONNECTING = 32
WAYS = ("round robin", "all at once", "one of many")
#: Descriptors that a connection needs at each side, and some.
DESCRIPTORS = 8


def contenders(counts: Iterable[int], transports: Iterable[str]) -> list[Contender]:
    jobs = (Job("opening"), *(Job("exchange", 8, way) for way in WAYS), *IDLE)
    return [
        Contender(
            f"{SCALE.format(count)} {transport}",
            transport,
            "ours_many",
            jobs,
            options={"tls": TLS[transport], "connections": count, "start": 30 + count / 20},
        )
        for transport in transports
        if transport in TLS
        for count in counts
    ]


def kib_used() -> float:
    """The memory of this process that is resident."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def allow_descriptors(connections: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 200 + DESCRIPTORS * connections
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise RuntimeError(f"{connections} connections need {wanted} file descriptors, and ulimit -Hn is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


class Growth:
    """The cost of further connections in this process, from here on: the first one also makes what they share."""

    def __init__(self, further: int) -> None:
        self._count = further
        self._memory, self._descriptors, self._begin = kib_used(), descriptors(), time.perf_counter()

    def each(self) -> dict[str, float]:
        if not self._count:
            return {}
        return {
            "kib": (kib_used() - self._memory) / self._count,
            "descriptors": (descriptors() - self._descriptors) / self._count,
            "seconds": (time.perf_counter() - self._begin) / self._count,
        }


@asynccontextmanager
async def open_end(control: Control, setup: dict[str, Any]) -> AsyncIterator[End]:
    count = setup["options"]["connections"]
    allow_descriptors(count)
    async with ucp.open_worker(**worker_options(setup)) as worker:
        if setup["role"] == "client":
            connections = await connect_all(worker, setup["address"], 1)
            growth = Growth(count - 1)
            connections += await connect_all(worker, setup["address"], count - 1)
            client = ClientEnd(connections)
            client.info = growth.each()
            client.transports = check_transports(connections[0].endpoint, setup)
            yield client
            for connection in connections:
                connection.abort()
            return
        server = ServerEnd(count)
        async with trio.open_nursery() as nursery:
            serve = partial(trio_ucx.serve_ucx, server.handle, 0, host="127.0.0.1", worker=worker)
            [listener] = await nursery.start(serve)
            await control.tell({"address": listener.address})
            await server.complete.wait()
            assert server.growth is not None
            server.info = server.growth.each()
            yield server
            nursery.cancel_scope.cancel()


async def connect_all(worker: ucp.Worker, address: list[Any], count: int) -> list[trio_ucx.Connection]:
    """Connections that have carried a message there and back: only then each is complete."""
    connections: list[trio_ucx.Connection] = []
    left = count

    async def connector() -> None:
        nonlocal left
        while left:
            left -= 1
            connection = await trio_ucx.open_ucx_stream(*address, worker=worker, connect_timeout=30)
            connections.append(connection)
            await connection.send(b"greeting", tag=TAG)
            await connection.receive(tag=TAG)

    async with trio.open_nursery() as nursery:
        for _ in range(min(CONNECTING, count)):
            nursery.start_soon(connector)
    return connections


class ServerEnd(End):
    def __init__(self, connections: int) -> None:
        super().__init__()
        self.missing = connections
        self.growth: Growth | None = None
        self.complete = trio.Event()
        self.echoed: int = 0
        self.wanted: float = math.inf
        self.done = trio.Event()

    async def handle(self, connection: trio_ucx.Connection) -> None:
        buffer = bytearray(8)
        try:
            await connection.receive_into(buffer, tag=TAG)
            await connection.send(buffer, tag=TAG)
            self.missing -= 1
            if self.growth is None:
                self.growth = Growth(self.missing)
            if not self.missing:
                self.complete.set()
            while True:
                await connection.receive_into(buffer, tag=TAG)
                await connection.send(buffer, tag=TAG)
                self.echoed += 1
                if self.echoed >= self.wanted:
                    self.done.set()
        except (trio.BrokenResourceError, trio.EndOfChannel):
            pass

    def prepare(self, batch: Batch) -> None:
        self.echoed, self.wanted, self.done = 0, batch.count, trio.Event()

    async def receive(self, batch: Batch) -> None:
        await self.done.wait()

    def verify(self, batch: Batch) -> None:
        pass  # the client does


class ClientEnd(End):
    def __init__(self, connections: list[trio_ucx.Connection]) -> None:
        super().__init__()
        self.connections = connections
        self.buffers = [bytearray(8) for _ in connections]
        self.payload = b""

    def prepare(self, batch: Batch) -> None:
        self.payload = batch.payload()
        for buffer in self.buffers:
            buffer[:] = bytes(8)

    async def _exchange(self, number: int, count: int = 1) -> None:
        connection, buffer, payload = self.connections[number], self.buffers[number], self.payload
        for _ in range(count):
            await connection.send(payload, tag=TAG)
            await connection.receive_into(buffer, tag=TAG)

    async def send(self, batch: Batch) -> None:
        there = len(self.connections)
        if batch.job.way == "one of many":
            await self._exchange(0, batch.count)
        elif batch.job.way == "round robin":
            for number in range(batch.count):
                await self._exchange(number % there)
        else:
            share, rest = divmod(batch.count, there)
            async with trio.open_nursery() as nursery:
                for number in range(there):
                    nursery.start_soon(self._exchange, number, share + (number < rest))
        self._check(batch)

    def _check(self, batch: Batch) -> None:
        used = 1 if batch.job.way == "one of many" else min(batch.count, len(self.connections))
        if any(buffer != self.payload for buffer in self.buffers[:used]):
            raise RuntimeError("wrong data arrived")
