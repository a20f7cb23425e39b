"""A server or a client of the soak: ``python -m faults.load.workload SETTINGS`` (JSON).

A client connects, says the connection's name and plan, and then both sides do at the same time what the plan says,
until one of them ends the connection in the way that the plan says. Everything is logged, nothing is judged here.

It ends when its standard input ends. SIGUSR1 writes the stacks of all threads to a file, SIGUSR2 those of all tasks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import math
import os
import random
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType
from typing import Any, cast

import attrs
import trio

import trio_ucx
from trio_ucx import ucp
from trio_ucx._util.live_handles import live_handles

from . import broken
from .log import Log, now
from .payload import HEADER, RECORD, Address, StreamReader, examine, make, make_write

HELLO, PING, PONG, FIRST_QUEUE = range(4)
AM_ID = 7
#: Exit status of a client that ended by ``os._exit``, as planned.
EXIT = 3
#: Remote memory: bytes of a cell, cells of a slot; each connection writes to a slot of its own.
CELL, CELLS, SLOTS = 1 << 16, 4, 64
COUNTERS = 4096
FEATURES = ucp.DEFAULT_FEATURES | ucp.Feature.RMA | ucp.Feature.AMO64
#: Seconds between two messages of a queue, on average.
THINK = 0.1
#: Windows of clients; small ones fill. The server's is the smallest.
WINDOWS = (1 << 15, 1 << 17, 1 << 20)
#: Shares of the ways in which a connection ends.
ENDS = {
    "client close": 40,
    "server close": 36,
    "client abort": 7,
    "server abort": 7,
    "client exception": 4,
    "server exception": 4,
    "client exit": 2,
}


@attrs.frozen
class Settings:
    """What the parent tells a process.

    Attributes:
        patience: seconds after which an operation is given up as late.
        broken: which part of the library to break; see ``broken.py``.
    """

    role: str
    name: str
    folder: str
    seed: str
    port: int
    transports: str
    patience: float
    slots: int = 2
    broken: str | None = None


class Leave(Exception):
    """A block is left by this exception, as planned."""


def outcome_of(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):  # of a chain: what follows a failed request fails because of it
        outcomes = [outcome_of(one) for one in error.exceptions]
        return next((one for one in outcomes if one != "error"), "error")
    if isinstance(error, trio.EndOfChannel):
        return "end"
    if isinstance(error, trio.ClosedResourceError):
        return "closed"
    if isinstance(error, trio.BrokenResourceError):
        return "broken"
    if isinstance(error, trio.Cancelled):
        return "cancelled"
    return "error"


def describe(error: BaseException) -> str:
    cause = f" from {error.__cause__!r}" if error.__cause__ is not None else ""
    return f"{error!r}{cause}"[:400]


@attrs.define
class Process:
    """What all connections of this process share."""

    settings: Settings
    log: Log
    worker: ucp.Worker
    random: random.Random
    stopping: trio.Event = attrs.field(factory=trio.Event)
    connections: int = 0
    #: The server's memory, by what it is for.
    memory: dict[str, ucp.Memory] = attrs.field(factory=dict)
    slots_given: int = 0

    def log_worker(self) -> None:
        """Logs the worker's figures; also when something broke, because this process may be killed in a moment."""
        statistics = self.worker.statistics()
        self.log.event("worker", missed=statistics.missed_events, stopped_queues=statistics.stopped_queues)

    async def do(
        self,
        connection: str,
        kind: str,
        call: Callable[[], Awaitable[Any]],
        got: Callable[[Any], dict[str, Any]] = lambda value: {},
        *,
        cancel: float | None = None,
        patience: float | None = None,
        **fields: Any,
    ) -> tuple[str, Any]:
        """Does one operation, and logs its begin and its end.

        Args:
            got: what to log of its value.
            cancel: seconds after which it is cancelled.

        Returns:
            Its outcome and its value.
        """
        patience = self.settings.patience if patience is None else patience
        if cancel is not None:
            fields["cancel"] = now() + int(cancel * 1e9)
        number = self.log.begin(connection, kind, **fields)
        outcome, value, said = "cancelled", None, {}
        try:
            with trio.move_on_after(patience) as late:
                with trio.move_on_after(math.inf if cancel is None else cancel):
                    value = await call()
                    outcome = "ok"
                    said = got(value)
            if late.cancelled_caught:
                outcome = "late"
        except Exception as error:
            outcome, said = outcome_of(error), {"why": describe(error)}
            self.log_worker()
        finally:
            self.log.event("end", op=number, o=outcome, **said)
        return outcome, value

    def sometimes(self, chance: float, longest: float) -> float | None:
        """When to cancel an operation: after so many seconds, or not at all."""
        return self.random.uniform(0, longest) if self.random.random() < chance else None


# ---- plans ----


def make_plan(chance: random.Random) -> dict[str, Any]:
    queues = [
        {"tag": FIRST_QUEUE + number, "direction": direction, "large": chance.random() < 0.4}
        for number, direction in enumerate(["up", "down", chance.choice(["up", "down"]), chance.choice(["up", "down"])])
    ]
    return {
        "queues": queues,
        "window": chance.choice(WINDOWS),
        "stream": chance.random() < 0.4,
        "am": chance.random() < 0.3,
        "memory": chance.choice([None, None, "allocated", "registered"]),
        "chains": chance.random() < 0.2,
        "seconds": chance.uniform(0.3, 3),
        "end": chance.choices(list(ENDS), list(ENDS.values()))[0],
        "when": chance.random(),
    }


def choose_size(chance: random.Random, large: bool) -> int:
    kind = chance.random()
    if kind < 0.4:
        return chance.randint(1, 64)
    if kind < 0.7 or not large:
        return chance.randint(1, 1024)
    if kind < 0.9:
        return chance.randint(1024, 1 << 16)
    if kind < 0.98:
        return chance.randint(1 << 16, 1 << 20)
    return chance.randint(1 << 20, 4 << 20)


# ---- one side of one connection ----


@attrs.define
class Side:
    """What one side does on a connection: the plan, until the connection ends."""

    process: Process
    connection: trio_ucx.Connection
    name: str
    side: str
    plan: dict[str, Any]
    welcome: dict[str, Any]
    random: random.Random
    #: Whether every queue was received until its end.
    complete: bool = True
    #: An operation has found that the connection is of no use any more.
    failed: bool = False
    #: This side has ended the connection.
    left: bool = False

    @property
    def out(self) -> str:
        return "up" if self.side == "client" else "down"

    @property
    def closes(self) -> bool:
        """Whether this side is the first to close."""
        return bool(self.plan["end"] == f"{self.side} close")

    async def run(self) -> None:
        """Does everything; the connection is closed then."""
        ender, _, way = self.plan["end"].partition(" ")
        deadline = trio.current_time() + self.plan["seconds"]
        try:
            async with trio.open_nursery() as background:
                async with trio.open_nursery() as nursery:
                    if way != "close" and ender == self.side:
                        background.start_soon(self.leave, way, self.plan["when"] * self.plan["seconds"])
                    self._start(nursery, deadline)
                    if self.side == "server":
                        background.start_soon(self.pong)
                if way != "close" and not self.failed:
                    # The end is at hand.
                    await self.do("wait_closed", self._until_closed, patience=self.patience + 3)
                background.cancel_scope.cancel()
            if way == "close" and not self.failed:
                self.left = True
                self.process.log.event("ending", c=self.name, side=self.side, how="close")
                await self.process.do(self.name, "aclose", self.connection.aclose, patience=12 + self.patience)
        finally:
            if not self.left:
                self.process.log.event("ending", c=self.name, side=self.side, how="abort", after="broken")
            self.connection.abort()
            self.process.log.event("over", c=self.name, side=self.side, all=self.complete and not self.failed)

    @property
    def patience(self) -> float:
        return self.process.settings.patience

    async def _until_closed(self) -> None:
        with contextlib.suppress(trio_ucx.PeerLost):
            await self.connection.wait_closed()

    def _start(self, nursery: trio.Nursery, deadline: float) -> None:
        for queue in self.plan["queues"]:
            address = Address(self.name, queue["direction"], queue["tag"])
            if queue["direction"] == self.out:
                nursery.start_soon(self.send_queue, address, queue["large"], deadline)
            else:
                nursery.start_soon(self.receive_queue, address)
        if self.plan["stream"]:
            nursery.start_soon(self.write_stream, deadline)
            nursery.start_soon(self.read_stream)
        if self.side == "client":
            nursery.start_soon(self.ping, deadline)
            if self.plan["am"] and self.welcome["am"]:
                nursery.start_soon(self.send_active_messages, deadline)
            if self.plan["memory"]:
                nursery.start_soon(self.use_memory, deadline)
            if self.plan["chains"]:
                nursery.start_soon(self.run_chains, deadline)

    async def leave(self, way: str, after: float) -> None:
        """Ends the connection by force."""
        await trio.sleep(after)
        self.left = True
        log = self.process.log
        if way == "exit":
            log.event("exit")
            os._exit(EXIT)
        log.event("ending", c=self.name, side=self.side, how=way)
        if way == "abort":
            self.connection.abort()
        else:
            try:
                async with self.connection:
                    raise Leave
            except Leave:
                pass

    async def do(self, kind: str, call: Callable[[], Awaitable[Any]], *args: Any, **fields: Any) -> tuple[str, Any]:
        """As :meth:`Process.do`; notes when the connection is of no use any more."""
        outcome, value = await self.process.do(self.name, kind, call, *args, **fields)
        if outcome not in ("ok", "cancelled", "end"):
            self.failed = True
            if outcome in ("late", "error") and not self.left:
                self.left = True
                self.process.log.event("ending", c=self.name, side=self.side, how="abort", after=outcome)
                self.connection.abort()
        return outcome, value

    async def think(self, mean: float = THINK) -> None:
        await trio.sleep(min(self.random.expovariate(1 / mean), 10 * mean))

    # -- messages --

    async def send_queue(self, to: Address, large: bool, deadline: float) -> None:
        number = 0
        while trio.current_time() < deadline:
            # Now and then many at once, so that they are sent in batches and fill the window.
            for _ in range(self.random.choice([1, 1, 1, 1, 1, 20])):
                number += 1
                data = make(to, number, choose_size(self.random, large))
                if not await self.send(to, number, data, self.process.sometimes(0.1, 0.01)):
                    return
            await self.think()
        number += 1
        await self.send(to, number, make(to, number, HEADER.size + 9, last=True), None)

    async def send(self, to: Address, number: int, data: bytes, cancel: float | None) -> bool:
        call = functools.partial(self.connection.send, data, tag=to.queue)
        outcome, _ = await self.do("send", call, cancel=cancel, q=to.queue, d=to.direction, n=number, len=len(data))
        return outcome in ("ok", "cancelled")

    async def receive_queue(self, to: Address) -> None:
        """Receives until the last message, or, where the other side closes first, until the end."""
        buffer = bytearray(4 << 20)
        last = False
        while True:
            into = self.random.random() < 0.3
            call = functools.partial(self._receive_into, buffer) if into else self.connection.receive
            outcome, data = await self.do(
                "drain" if last else "receive",
                functools.partial(call, tag=to.queue),
                lambda data: examine(to, data),
                cancel=self.process.sometimes(0.1, 0.05),
                patience=self.patience + self.plan["seconds"] if last else None,
                q=to.queue,
                d=to.direction,
            )
            if outcome == "ok":
                last = last or (len(data) >= HEADER.size and bool(examine(to, data).get("last")))
                if last and self.closes:
                    return
            elif outcome == "cancelled" and into:
                await self.do("wait_buffers_released", self.connection.wait_buffers_released)
            elif outcome != "cancelled":
                self.complete = self.complete and outcome == "end"
                return
            if self.random.random() < 0.05:
                await self.think(0.02)

    async def _receive_into(self, buffer: bytearray, tag: int) -> bytes:
        length = await self.connection.receive_into(buffer, tag=tag)
        return bytes(memoryview(buffer)[:length])

    async def ping(self, deadline: float) -> None:
        number = 0
        while trio.current_time() < deadline:
            number += 1
            outcome, _ = await self.do(
                "ping", functools.partial(self._ping, number), lambda answer: {"answer": answer}, n=number
            )
            if outcome != "ok":
                return
            await self.think()

    async def _ping(self, number: int) -> str:
        text = f"{self.name} {number}"
        await self.connection.send(text.encode(), tag=PING)
        answer = await self.connection.receive(tag=PONG)
        return "right" if answer == text.encode() else answer[:80].decode(errors="replace")

    async def pong(self) -> None:
        try:
            while True:
                await self.connection.send(await self.connection.receive(tag=PING), tag=PONG)
        except (trio.EndOfChannel, trio.ClosedResourceError, trio.BrokenResourceError):
            pass

    # -- the byte stream --

    async def write_stream(self, deadline: float) -> None:
        number = 0
        while trio.current_time() < deadline:
            number += 1
            records = max(1, choose_size(self.random, self.random.random() < 0.2) // 2 // RECORD.size)
            data = make_write(self.name, self.out, number, records)
            outcome, _ = await self.do(
                "write",
                functools.partial(self.connection.send_all, data),
                cancel=self.process.sometimes(0.05, 0.01),
                d=self.out,
                n=number,
                records=records,
            )
            if outcome not in ("ok", "cancelled"):
                return
            await self.think()
        await self.do("send_eof", self.connection.send_eof, d=self.out)

    async def read_stream(self) -> None:
        direction = "down" if self.out == "up" else "up"
        reader = StreamReader(self.name, direction)
        while True:
            outcome, data = await self.do(
                "read",
                self.connection.receive_some,
                lambda data: reader.feed(data) | ({} if data else {"eof": True}),
                cancel=self.process.sometimes(0.05, 0.05),
                patience=self.patience + self.plan["seconds"],
                d=direction,
            )
            if outcome == "ok" and not data:
                return
            if outcome not in ("ok", "cancelled"):
                self.complete = False
                return

    # -- the client's: active messages, remote memory, chains --

    async def send_active_messages(self, deadline: float) -> None:
        endpoint = self.connection.endpoint
        to = Address(self.name, "up", AM_ID)
        number = 0
        while trio.current_time() < deadline:
            number += 1
            header = json.dumps([self.name, number]).encode()
            data = make(to, number, HEADER.size + choose_size(self.random, True))
            outcome, _ = await self.do(
                "am_send",
                functools.partial(endpoint.am_send, AM_ID, data, header, reply=True),
                cancel=self.process.sometimes(0.05, 0.01),
                n=number,
                len=len(data),
            )
            if outcome not in ("ok", "cancelled"):
                return
            await self.think()

    async def use_memory(self, deadline: float) -> None:
        endpoint = self.connection.endpoint
        slots = bytes.fromhex(self.welcome[self.plan["memory"]])
        counters = bytes.fromhex(self.welcome["counters"])
        try:
            with endpoint.attach(slots) as remote, endpoint.attach(counters) as counter:
                while trio.current_time() < deadline:
                    if not await self._use_cell(remote, self.random.randrange(CELLS)):
                        return
                    if not await self._count(counter):
                        return
                    await self.think()
        except (trio.BrokenResourceError, trio.ClosedResourceError):  # from attach
            self.failed = True

    async def _use_cell(self, remote: ucp.RemoteMemory, cell: int) -> bool:
        """Writes to a cell and reads it back."""
        offset = (self.welcome["slot"] * CELLS + cell) * CELL
        data = self.random.randbytes(min(choose_size(self.random, True), CELL))
        put = functools.partial(remote.put, data, offset)
        cancel = self.process.sometimes(0.05, 0.01)
        checksum, length = zlib.crc32(data), len(data)
        outcome, _ = await self.do("put", put, cancel=cancel, cell=cell, len=length, sum=checksum)
        if outcome == "cancelled":
            outcome, _ = await self.do("flush", remote.flush)
            return outcome == "ok"
        if outcome != "ok" or (await self.do("flush", remote.flush))[0] != "ok":
            return False
        outcome, _ = await self.do(
            "get",
            functools.partial(remote.get, offset, length),
            lambda read: {"sum": zlib.crc32(read)},
            cancel=self.process.sometimes(0.05, 0.01),
            cell=cell,
            len=length,
        )
        return outcome in ("ok", "cancelled")

    async def _count(self, counter: ucp.RemoteMemory) -> bool:
        outcome, _ = await self.do(
            "fetch_add",
            functools.partial(counter.fetch_add, 1, 0),
            lambda value: {"value": value},
            cancel=self.process.sometimes(0.05, 0.01),
            server=self.welcome["pid"],
        )
        return outcome in ("ok", "cancelled")

    async def run_chains(self, deadline: float) -> None:
        endpoint = self.connection.endpoint
        slots = bytes.fromhex(self.welcome["allocated"])
        counters = bytes.fromhex(self.welcome["counters"])
        try:
            with endpoint.attach(slots) as remote, endpoint.attach(counters) as counter:
                while trio.current_time() < deadline:
                    if not await self._run_chain(remote, counter):
                        return
                    await self.think()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.failed = True

    async def _run_chain(self, remote: ucp.RemoteMemory, counter: ucp.RemoteMemory) -> bool:
        """Writes, reads, counts, writes or not by what was read, and reads again."""
        data = self.random.randbytes(self.random.randint(1, 512))
        offset = self.welcome["chain_slot"] * CELLS * CELL

        with self.connection.worker.new_chain(capacity=8) as chain:

            async def run() -> list[Any]:
                put = chain.put(remote, data, offset=offset)
                read = chain.get(remote, offset=offset, length=len(data), after=put)
                old = chain.fetch_add(counter, 1, offset=0, after=read)
                wrong = read.u8(0) == (data[0] + 1) % 256
                never = chain.put(remote, b"never", offset=offset, when=wrong, on_false="skip", after=old)
                again = chain.get(remote, offset=offset, length=len(data), after=never)
                outcomes = await chain.run()
                outcomes.values()
                return [outcomes.value(request) for request in (read, old, again)]

            outcome, _ = await self.do(
                "chain",
                run,
                lambda values: {"sums": [zlib.crc32(values[0]), zlib.crc32(values[2])], "value": values[1]},
                cancel=self.process.sometimes(0.05, 0.01),
                server=self.welcome["pid"],
                sum=zlib.crc32(data),
            )
            if outcome == "cancelled":
                outcome, _ = await self.do("wait_idle", chain.wait_idle)
        return outcome == "ok"


# ---- the client ----


async def run_client(process: Process) -> None:
    say_ready()
    async with trio.open_nursery() as nursery:
        for slot in range(process.settings.slots):
            nursery.start_soon(keep_connecting, process, slot)


async def keep_connecting(process: Process, slot: int) -> None:
    number = 0
    while not process.stopping.is_set():
        number += 1
        name = f"{process.settings.name}.{slot}.{number}"
        if not await live_once(process, name):
            with trio.move_on_after(process.random.uniform(0.05, 0.3)):
                await process.stopping.wait()


async def live_once(process: Process, name: str) -> bool:
    """One connection. Returns whether it was opened."""
    chance = random.Random(process.random.random())
    plan = make_plan(chance)
    connections: list[trio_ucx.Connection] = []

    async def meet() -> dict[str, Any]:
        port, window = process.settings.port, plan["window"]
        connections.append(await trio_ucx.open_ucx_stream("127.0.0.1", port, worker=process.worker, window=window))
        hello = {"name": name, "plan": plan, "pid": os.getpid(), "seed": chance.random()}
        await connections[0].send(json.dumps(hello).encode(), tag=HELLO)
        return cast(dict[str, Any], json.loads(await connections[0].receive(tag=HELLO)))

    cancel = process.sometimes(0.15, 0.03)
    outcome, welcome = await process.do(name, "connect", meet, cancel=cancel, patience=10 + process.settings.patience)
    if outcome != "ok":
        process.log.event("ending", c=name, side="client", how="abort", after=outcome)
        for connection in connections:
            connection.abort()
        process.log.event("over", c=name, side="client", all=False)
        return False
    process.connections += 1
    process.log.event("open", c=name, side="client", peer=welcome["pid"], end=plan["end"])
    await Side(process, connections[0], name, "client", plan, welcome, chance).run()
    return True


# ---- the server ----


async def run_server(process: Process) -> None:
    worker = process.worker
    context = worker.context
    with (
        context.allocate(COUNTERS) as counters,
        context.allocate(SLOTS * CELLS * CELL) as allocated,
        context.register(bytearray(SLOTS * CELLS * CELL)) as registered,
        worker.open_active_messages(AM_ID) as messages,
    ):
        counters.memoryview[:] = bytes(COUNTERS)
        process.memory = {"counters": counters, "allocated": allocated, "registered": registered}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_active_messages, process, messages)
            handler = functools.partial(serve_client, process)
            serve = functools.partial(trio_ucx.serve_ucx, host="127.0.0.1", worker=worker, window=WINDOWS[0])
            await nursery.start(serve, handler, process.settings.port)
            say_ready()
            await process.stopping.wait()
            with trio.move_on_after(process.settings.patience):  # for connections whose clients have just ended
                while process.connections > 0:
                    await trio.sleep(0.05)
            nursery.cancel_scope.cancel()


async def serve_client(process: Process, connection: trio_ucx.Connection) -> None:
    hello = None
    with trio.move_on_after(process.settings.patience):
        try:
            hello = json.loads(await connection.receive(tag=HELLO))
        except (trio.EndOfChannel, trio.BrokenResourceError):
            pass
    if hello is None:
        connection.abort()
        return
    name, plan = hello["name"], hello["plan"]
    process.log.event("open", c=name, side="server", peer=hello["pid"], end=plan["end"])
    process.slots_given += 2
    welcome = {
        "pid": os.getpid(),
        "am": connection.worker is process.worker,
        "slot": process.slots_given % SLOTS,
        "chain_slot": (process.slots_given + 1) % SLOTS,
        **{name: memory.descriptor.hex() for name, memory in process.memory.items()},
    }
    side = Side(process, connection, name, "server", plan, welcome, random.Random(hello["seed"]))
    process.connections += 1
    try:
        greet = functools.partial(connection.send, json.dumps(welcome).encode(), tag=HELLO)
        if (await side.do("welcome", greet))[0] != "ok":
            side.complete = False
        await side.run()
    finally:
        process.connections -= 1


async def receive_active_messages(process: Process, messages: ucp.ActiveMessages) -> None:
    async for message in messages:
        with message:
            name, number = json.loads(message.header)
            try:
                data = await message.receive() if message.rendezvous else bytes(message.data)
            except (trio.BrokenResourceError, trio_ucx.UCXError) as error:
                process.log.event("am", c=name, n=number, broken=describe(error))
                continue
            said = examine(Address(name, "up", AM_ID), data)
            fault = said.get("fault") or (None if said.get("n") == number else "torn: header and data differ")
            process.log.event("am", c=name, n=number, fault=fault)


# ---- the process ----


def sample(process: Process, over: threading.Event) -> None:
    """What the process takes, each second. A thread of its own: it goes on when Trio's loop hangs."""
    kept_waiting = 0
    before = starved(), time.monotonic_ns(), time.process_time_ns()
    while True:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        process.log.event(
            "sample",
            fds=len(os.listdir("/proc/self/fd")) - 1,
            threads=len(os.listdir("/proc/self/task")),
            rss=pages * os.sysconf("SC_PAGE_SIZE"),
            starved=kept_waiting,
        )
        for _ in range(20):
            if over.wait(1 / 20):
                return
            now = starved(), time.monotonic_ns(), time.process_time_ns()
            waited, passed, computed = (after - earlier for after, earlier in zip(now, before, strict=True))
            kept_waiting += max(waited, passed - computed - 10**9 // 20, 0)
            before = now


def end_with(arguments: threading.ExceptHookArgs) -> None:
    """An exception in a thread ends the process, which the checker reports."""
    threading.__excepthook__(arguments)
    os._exit(1)


def starved() -> int:
    """Nanoseconds for which the main thread was ready to run and the machine had no processor for it."""
    try:
        return int(Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        return 0


async def watch_worker(process: Process) -> None:
    while True:
        process.log_worker()
        await trio.sleep(1)


def say_ready() -> None:
    """Tells the parent."""
    os.write(1, b"r")


async def watch_stdin(process: Process) -> None:
    async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
        while await stdin.receive_some(4096):
            pass
    process.stopping.set()


def dump_tasks(file: Any) -> Callable[[int, FrameType | None], None]:
    def dump(_: int, frame: FrameType | None) -> None:
        try:
            for task in _tasks(trio.lowlevel.current_root_task()):
                print(f"-- task {task.name}", file=file)
                for line in traceback.StackSummary.extract(task.iter_await_frames()).format():
                    print(line, end="", file=file)
        except RuntimeError:
            print("-- no Trio run", file=file)
        file.flush()

    return dump


def _tasks(root: trio.lowlevel.Task | None) -> Iterator[trio.lowlevel.Task]:
    if root is not None:
        yield root
        for nursery in root.child_nurseries:
            for task in nursery.child_tasks:
                yield from _tasks(task)


async def run(settings: Settings, log: Log) -> dict[str, Any]:
    """Runs until standard input ends; returns the worker's figures."""
    over = threading.Event()
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(
            ucp.open_worker(config={"TLS": settings.transports}, features=FEATURES, name=settings.name)
        )
        process = Process(settings, log, worker, random.Random(settings.seed))
        sampler = threading.Thread(target=sample, args=(process, over), daemon=True)
        sampler.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_stdin, process)
            nursery.start_soon(watch_worker, process)
            await (run_server if settings.role == "server" else run_client)(process)
            nursery.cancel_scope.cancel()
    over.set()
    await trio.to_thread.run_sync(sampler.join, 5)
    statistics = worker.statistics()
    return {"missed": statistics.missed_events, "stopped_queues": statistics.stopped_queues}


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    folder = Path(settings.folder)
    stacks = (folder / f"{settings.name}.stacks").open("w")
    faulthandler.enable(stacks)
    threading.excepthook = end_with
    faulthandler.register(signal.SIGUSR1, stacks)
    signal.signal(signal.SIGUSR2, dump_tasks(stacks))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to end
    log = Log(folder, settings.name)
    log.event("start", role=settings.role, name=settings.name, transports=settings.transports)
    if settings.broken is not None:
        broken.switch_on(settings.broken)
    figures = trio.run(run, settings, log)
    log.event("finish", handles=live_handles.counts(), **figures)
    log.close()


if __name__ == "__main__":
    main()
