"""The processes of a storm: ``python -m faults.load.storm_roles ROLE ARGUMENTS`` (JSON). See ``storms.py``.

Each writes lines of JSON to its standard output, and ends when its standard input ends or its work is done.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio

import trio_ucx
from trio_ucx import ucp
from trio_ucx._util.live_handles import live_handles
from trio_ucx.testing._introspection import internals

#: Cycles until a client process takes a new worker.
GENERATION = 500
#: Exit status of a client process that ends itself.
EXIT = 9
MAGIC = b"trio_ucx"
FEATURES = ucp.DEFAULT_FEATURES | ucp.Feature.RMA | ucp.Feature.AMO64


def say(thing: Any) -> None:
    os.write(1, json.dumps(thing).encode() + b"\n")


async def ask() -> bool:
    """Waits for a line; returns whether there is one."""
    await trio.lowlevel.wait_readable(0)
    return bool(os.read(0, 4096))


# ---- the server ----


async def echo(connection: trio_ucx.Connection) -> None:
    async def messages() -> None:
        async for message in connection.messages():
            await connection.send(message)

    async def stream() -> None:
        async for chunk in connection:
            await connection.send_all(chunk)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(messages)
        nursery.start_soon(stream)


def state(worker: ucp.Worker) -> dict[str, Any]:
    gc.collect()
    statistics = worker.statistics()
    handles = live_handles.counts()
    return {
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "segments": sum("SYSV" in line or "/dev/shm" in line for line in Path("/proc/self/maps").open()),
        "connections": handles.get("connection", 0),
        "endpoints": handles.get("endpoint", 0),
        "handles": sum(handles.values()),
        "sinks": len(internals(worker).tag_dispatch.sinks),
        "in flight": statistics.operations_in_flight,
        "missed": statistics.missed_events,
    }


async def serve() -> None:
    """Sends everything back. Reports its address and a descriptor of memory, then its state for each line."""
    with ucp.open_context(features=FEATURES) as context:
        async with ucp.open_worker(context=context) as worker, trio.open_nursery() as nursery:
            memory = context.allocate(4096)
            options: dict[str, Any] = {"host": "127.0.0.1", "worker": worker, "connect_timeout": 30, "backlog": 5000}
            [listener] = await nursery.start(partial(trio_ucx.serve_ucx, echo, 0, **options))
            say({"address": listener.address, "memory": memory.descriptor.hex()})
            while await ask():
                say(state(worker))
            nursery.cancel_scope.cancel()
        memory.close()


# ---- a crowd ----


async def crowd(address: list[Any], seed: str, clients: int, seconds: float) -> None:
    """So many connections at once, which exchange messages for so many seconds. Reports how that went."""
    opening: list[float] = []
    trips: list[float] = []
    errors: Counter[str] = Counter()

    async def client(number: int, worker: ucp.Worker) -> None:
        chance = random.Random(f"{seed} {number}")
        start = time.perf_counter()
        try:
            async with trio_ucx.connect(tuple(address), worker=worker, connect_timeout=60) as connection:
                opening.append(time.perf_counter() - start)
                end = trio.current_time() + seconds
                index = 0
                while trio.current_time() < end:
                    message = struct.pack("<II", number, index) + chance.randbytes(
                        chance.choice([0, 100, 2000, 80_000])
                    )
                    before = time.perf_counter()
                    await connection.send(message)
                    answer = await connection.receive()
                    trips.append(time.perf_counter() - before)
                    if answer != message:
                        errors["wrong data"] += 1
                    index += 1
                    await trio.sleep(chance.uniform(0, 0.5))
        except Exception as error:
            errors[repr(error)[:200]] += 1

    async with ucp.open_worker() as worker, trio.open_nursery() as nursery:
        for number in range(clients):
            nursery.start_soon(client, number, worker)
    say({"opening": opening, "trips": trips, "errors": errors})


# ---- cycles ----


class Cycle:
    """One cycle of a client: it connects, exchanges, and ends in some way."""

    def __init__(self, address: tuple[str, int], worker: ucp.Worker, chance: random.Random, deadly: bool) -> None:
        self.address = address
        self.worker = worker
        self.chance = chance
        self.deadly = deadly

    async def run(self) -> str:
        """Returns the way that it took."""
        ways: dict[Callable[[], Awaitable[object]], int] = {
            self.closes: 40,
            self.aborts: 15,
            self.is_cancelled: 15,
            self.raises: 8,
            self.gives_up_connecting: 6,
            self.says_nothing: 4,
            self.half_a_hello: 4,
            self.is_silent: 6,
        }
        [way] = self.chance.choices(list(ways), list(ways.values()))
        if self.deadly and self.chance.random() < 0.002:
            self._die()
        await way()
        return way.__name__.replace("_", " ")

    async def _exchange(self, connection: trio_ucx.Connection) -> None:
        for _ in range(self.chance.choice([0, 1, 2, 5])):
            data = self.chance.randbytes(self.chance.choice([0, 8, 1000, 5000, 100_000]))
            await connection.send(data)
            if await connection.receive() != data:
                raise RuntimeError("wrong data")
            if self.chance.random() < 0.2:
                await connection.send_all(b"stream")
                if await connection.receive_some(6) != b"stream":
                    raise RuntimeError("wrong data in the byte stream")

    async def _connect(self) -> trio_ucx.Connection:
        return await trio_ucx.open_ucx_stream(*self.address, worker=self.worker, connect_timeout=30)

    async def closes(self) -> None:
        async with await self._connect() as connection:
            await self._exchange(connection)

    async def aborts(self) -> None:
        connection = await self._connect()
        if self.chance.random() < 0.5:
            await self._exchange(connection)
        else:
            connection.send_nowait(bytes(self.chance.choice([1, 3000])))
        connection.abort()

    async def is_cancelled(self) -> None:
        async with await self._connect() as connection:
            with trio.move_on_after(self.chance.uniform(0, 0.01)):
                while True:
                    await self._exchange(connection)
                    await connection.send(bytes(1 << 20))
                    await connection.receive()

    async def raises(self) -> None:
        with contextlib.suppress(ZeroDivisionError):
            async with trio_ucx.connect(self.address, worker=self.worker, connect_timeout=30) as connection:
                await self._exchange(connection)
                raise ZeroDivisionError

    async def gives_up_connecting(self) -> None:
        with trio.move_on_after(self.chance.uniform(0, 0.02)):
            connection = await self._connect()
            connection.abort()

    async def _bare(self, data: bytes) -> None:
        stream = await trio.open_tcp_stream(*self.address)
        async with stream:
            if data:
                await stream.send_all(data)
            await trio.sleep(self.chance.choice([0, 0, 0.05, 0.2]))
            if self.chance.random() < 0.5:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST

    async def says_nothing(self) -> None:
        await self._bare(b"")

    async def half_a_hello(self) -> None:
        preamble = MAGIC + struct.pack("<HH", 3, 0) + bytes(32) + struct.pack("<IB", 300, 3)
        await self._bare(preamble[: self.chance.randrange(1, len(preamble))])

    async def is_silent(self) -> None:
        connection = await self._connect()
        await trio.sleep(self.chance.choice([0, 0.05, 0.2]))
        await connection.aclose() if self.chance.random() < 0.5 else connection.abort()

    def _die(self) -> None:
        """By ``os._exit``, or over TCP inside UCX perhaps: over shared memory that could stop the server's queue."""
        if os.environ.get("UCX_TLS") != "tcp" or self.chance.random() < 0.5:
            os._exit(EXIT)
        threading.Timer(self.chance.uniform(0, 0.02), os.kill, (os.getpid(), signal.SIGKILL)).start()


async def cycles(address: list[Any], seed: str, first: int, count: int, together: int, deadly: bool) -> None:
    """Runs the cycles with these numbers, some at the same time. Reports each before it begins, and the way it took."""
    numbers = iter(range(first, first + count))

    async def some(worker: ucp.Worker) -> None:
        for number in itertools.islice(numbers, GENERATION // together):
            say(number)
            chance = random.Random(f"{seed} {number}")
            try:
                say(await Cycle((address[0], address[1]), worker, chance, deadly).run())
            except (OSError, trio.BrokenResourceError) as error:
                say(f"failed: {type(error).__name__}: {str(error)[-160:]}")

    for _ in range(0, count, GENERATION):
        async with ucp.open_worker() as worker, trio.open_nursery() as nursery:
            for _ in range(together):
                nursery.start_soon(some, worker)


def main() -> None:
    role, arguments = sys.argv[1:]
    functions: dict[str, Callable[..., Any]] = {"serve": serve, "crowd": crowd, "cycles": cycles}
    trio.run(lambda: functions[role](*json.loads(arguments)))


if __name__ == "__main__":
    main()
